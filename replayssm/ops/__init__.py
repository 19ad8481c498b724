"""The three verbs (scan, replay, flush) over records: reference and chunked."""
