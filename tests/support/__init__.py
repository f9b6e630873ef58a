"""Test support: tiny checkpoints, real SGLang servers on a CPU, and what to compare their answers with."""
