"""The engine side: a session over the ranks of one engine, and the writing of weights."""
