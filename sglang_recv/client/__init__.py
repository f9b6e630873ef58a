"""The trainer side: nothing here imports SGLang."""
