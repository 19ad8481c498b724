"""Reading a checkpoint's config.json: a field is used, known not to change the maths, or refused."""

from collections.abc import Iterable, Mapping
from typing import Any

from replayssm.checks import expect

# Names, token ids, training, and what steers other libraries: the same logits whatever they say.
HARMLESS = frozenset(
    [
        *("_attn_implementation_autoset", "_name_or_path", "architectures", "auto_map", "model_type"),
        *("transformers_version", "id2label", "label2id", "is_decoder", "return_dict", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "num_logits_to_keep"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "max_position_embeddings", "chunk_size"),
        *("attention_dropout", "hidden_dropout", "initializer_range", "rescale_prenorm_residual"),
        "router_aux_loss_coef",
    ]
)
DEPTHS, DEEPEST = ("num_hidden_layers", "n_layer"), 10_000  # published models have at most some hundred blocks
_MISSING = object()


class Fields:
    """The fields of one config.json, counted as they are read.

    Args:
        family: names the family in errors.
        source: the content of config.json, or of the part of it that describes the text model.
        harmless: fields that do not change the maths of this family, beside those that never do.
    """

    def __init__(self, family: str, source: Mapping[str, Any], harmless: Iterable[str] = ()):
        self.family, self.where = family, f"Config ({family})"
        self._source, self._harmless, self._read = source, HARMLESS.union(harmless), set[str]()

    def __call__(self, name: str, default: Any = _MISSING) -> Any:
        """The value of a field; ``default`` is what the family's own code takes where the file leaves it out.

        Raises:
            ValueError: the field is missing and has no default, or says more blocks than any model has.
        """
        self._read.add(name)
        value = self._source.get(name, default)
        expect(
            value is not _MISSING,
            f"{self.where}: config.json must have {name}; got {', '.join(self._source) or 'nothing'}. Use the file "
            "that came with the weights.",
        )
        expect(  # families write an entry for each block before anything is compared with the weights
            name not in DEPTHS or not isinstance(value, int) or value <= DEEPEST,
            f"{self.where}: {name} must be at most {DEEPEST}; got {value}. Use the file that came with the weights.",
        )
        return _plain(value)

    def number(self, name: str, default: Any = _MISSING) -> Any:
        """A field that must not be null, where null means something else to our own layers.

        Raises:
            ValueError: it is missing, or null.
        """
        value = self(name, default)
        expect(value is not None, f"{self.where}: {name} must be a number; got null. Use the file of the weights.")
        return value

    def only(self, name: str, *known: Any) -> Any:
        """A field of which we know some values; the first is the default.

        Raises:
            NotImplementedError: another value.
        """
        value = self(name, known[0])
        if value not in known:
            raise NotImplementedError(
                f"{self.where}: {name} must be one of {', '.join(map(repr, known))}; got {value!r}. Other values "
                "change the model and are not supported."
            )
        return value

    def dtype(self) -> dict[str, str]:
        """{"dtype": name}, or {} where the file does not say."""
        old, new = self("torch_dtype", None), self("dtype", None)
        return {} if new is None and old is None else {"dtype": new or old}

    def done(self) -> None:
        """Refuse fields that nobody has asked for.

        Raises:
            ValueError: lists all of them.
        """
        unknown = sorted(self._source.keys() - self._read - self._harmless)
        expect(
            not unknown,
            f"{self.where}: config.json must hold fields that are understood; got {', '.join(unknown)}. They may "
            "change the model: remove them only if you know that they do not.",
        )


def rotary(field: Fields, headdim: int, *, share: float = 1.0) -> dict[str, Any]:
    """The arguments of ``Attention`` for rotary positions, however the file spells them.

    Args:
        share: of a head's channels that are rotated, where the file does not say.
    """
    field.only("rope_scaling", None)
    theta, share = field("rope_theta", 10000.0), field("partial_rotary_factor", share)
    newer = field("rope_parameters", None)
    if newer is not None:
        inner = Fields(f"{field.family}, rope_parameters", newer, ["mrope_interleaved", "mrope_section"])
        inner.only("rope_type", "default")
        theta, share = inner("rope_theta", theta), inner("partial_rotary_factor", share)
        inner.done()
    return {"rope_theta": theta, "rotary_dim": int(headdim * share)}


def _plain(value: Any) -> Any:
    """What transformers writes for numbers that JSON does not have, as the numbers."""
    if isinstance(value, dict) and value.keys() == {"__float__"}:
        return float(value["__float__"])
    return [_plain(item) for item in value] if isinstance(value, list) else value
