"""The state of a decode: counters, checkpoints, rings."""
