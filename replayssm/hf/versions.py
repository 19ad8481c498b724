"""Which releases of transformers the patch fits."""

OLDEST, NEWEST = (5, 17), (5, 24)  # both run in CI; the mixers' arguments and the cache's protocol are those between


def expect_transformers(where: str) -> None:
    """Raise ImportError unless a transformers that the patch fits is installed."""
    supported = f"{_text(OLDEST)} to {_text(NEWEST)}"
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"{where}: transformers must be installed, a release from {supported}; got none. "
            "Run pip install 'replayssm[hf]'."
        ) from error
    release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not OLDEST <= release <= NEWEST:
        raise ImportError(
            f"{where}: transformers must be a release from {supported}; got {transformers.__version__}. "
            "Run pip install 'replayssm[hf]', which takes one of these."
        )


def _text(release: tuple[int, int]) -> str:
    return ".".join(str(part) for part in release)
