"""The replay layers."""
