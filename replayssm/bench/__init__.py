"""Measurements: what decoding by replay costs on a GPU, beside a tuned conventional step in the same run."""
