"""A shorter model out of a longer one: some decoder layers kept, the others left out.

The short model is built from a shortened configuration and the kept weights, exactly as its saved folder would be
loaded, so cache, layer numbers and reloading are right by construction. `models/backbone.py` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from etude.errors import ModelError
from etude.models.folders import quiet

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Entries of a configuration that hold one value a layer. One that is missing here is found by `_require_same_layers`.
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "indexer_types")


def keep_layers(model: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """A model of these decoder layers only, in their order; embedding, last norm and head are the same.

    Args:
        kept: layer numbers from 0, ascending.

    Raises:
        ModelError: a number is out of range, repeated or out of order, or the architecture cannot be shortened.
    """
    prefix, layers = _decoder_layers(model)
    if not kept or list(kept) != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= len(layers):
        raise ModelError(
            f"student.keep_layers = {list(kept)} does not fit {type(model).__name__} with its {len(layers)} layers; "
            f"name layers between 0 and {len(layers) - 1}, ascending, each once"
        )
    short = _rebuilt(model, _renumbered(model.state_dict(), prefix, kept), kept, len(layers))
    _require_same_layers(model, layers, _decoder_layers(short)[1], kept)
    short.name_or_path = model.name_or_path
    short.generation_config = model.generation_config
    return short


def _rebuilt(model: PreTrainedModel, weights: dict[str, Tensor], kept: Sequence[int], count: int) -> PreTrainedModel:
    """A new model of the same class, loaded with these weights under the shortened configuration."""
    engine: Any = type(model)
    try:
        with quiet():
            short, report = engine.from_pretrained(
                None,
                config=_shortened(model.config, kept, count),
                state_dict=weights,
                dtype=model.dtype,
                output_loading_info=True,
            )
    except Exception as error:  # what a configuration may raise is not documented
        raise ModelError(_cannot(model, str(error).strip().splitlines()[-1].strip())) from None
    if report["missing_keys"] or report["unexpected_keys"]:
        raise ModelError(_cannot(model, "its weights do not follow from the configuration alone"))
    return short


def _cannot(model: PreTrainedModel, reason: str) -> str:
    return f"student.keep_layers does not work for {type(model).__name__}: {reason}; leave it out"


def _decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The decoder's list of layers, and its name within the model."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [part for part in model.get_decoder().children() if isinstance(part, nn.ModuleList) and len(part) == count]
    if len(lists) != 1:
        raise ModelError(_cannot(model, f"it has no single list of {count} decoder layers"))
    return next(name for name, part in model.named_modules() if part is lists[0]), lists[0]


def _shortened(config: PretrainedConfig, kept: Sequence[int], count: int) -> PretrainedConfig:
    short = deepcopy(config)
    text: Any = short.get_text_config(decoder=True)
    for name in PER_LAYER:
        values = getattr(text, name, None)
        if isinstance(values, list) and len(values) == count:
            setattr(text, name, [values[layer] for layer in kept])
    text.num_hidden_layers = len(kept)
    return type(config).from_dict(short.to_dict())  # through the form it is saved in: what reloading would see


def _renumbered(weights: Mapping[str, Tensor], prefix: str, kept: Sequence[int]) -> dict[str, Tensor]:
    """Weights by name, those of kept layers under their new number, those of the others left out.

    >>> sorted(_renumbered({"h.0.w": 0, "h.1.w": 1, "h.2.w": 2, "head": 3}, "h", [0, 2]).items())
    [('h.0.w', 0), ('h.1.w', 2), ('head', 3)]
    """
    renumbered: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name.startswith(f"{prefix}."):
            number, _, rest = name.removeprefix(f"{prefix}.").partition(".")
            if int(number) not in kept:
                continue
            name = f"{prefix}.{kept.index(int(number))}.{rest}"
        renumbered[name] = weight
    return renumbered


def _require_same_layers(
    model: PreTrainedModel, layers: nn.ModuleList, short_layers: nn.ModuleList, kept: Sequence[int]
) -> None:
    """Each kept layer must be what it was: no window, rotary switch or the like that moved with its number."""
    for number, layer in enumerate(kept):
        before, after = _traits(layers[layer]), _traits(short_layers[number])
        differing = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        if differing:
            raise ModelError(_cannot(model, f"{differing[0]} of layer {layer} would change with its number"))


def _traits(layer: nn.Module) -> dict[str, object]:
    """The plain settings of a layer's modules, its number aside."""
    return {
        f"{path}.{name}": value
        for path, part in layer.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, bool | int | float | str) and name not in ("layer_idx", "layer_id", "training")
    }
