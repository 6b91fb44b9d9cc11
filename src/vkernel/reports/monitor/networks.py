"""The module that is evaluated: the network without its wrappers, or with averaged weights.

Wrappers are taken off: ``DistributedDataParallel`` and ``DataParallel`` (whose forward would communicate),
``torch.compile`` (the module itself is evaluated, so that nothing is compiled again), and holders of a module without a
forward of their own. Weights that are split over devices (FSDP, ZeRO) cannot be evaluated on one of them.

Averaged weights are a module (``torch.optim.swa_utils.AveragedModel`` among them), a mapping from names to tensors, an
object with ``shadow_params`` (diffusers' and torch_ema's), which are evaluated without touching the network, or one
with ``store``, ``copy_to`` and ``restore``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from vkernel.core.errors import InputError, require

PREFIXES = ("module.", "_orig_mod.")
SPLIT = ("FullyShardedDataParallel", "FSDPModule")
Network = Callable[..., object]


class Substituted(nn.Module):
    """A module that is called with other weights; its own are not changed."""

    def __init__(self, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.module, self.weights = module, dict(weights)

    def forward(self, *args: Any, **named: Any) -> object:
        """Call the module with the weights."""
        return functional_call(self.module, self.weights, args, named)


def unwrapped(network: object) -> Network:
    """Return the module inside wrappers; refuse what cannot be called on one device."""
    for _ in range(16):
        if not isinstance(network, nn.Module):
            break
        parallel = isinstance(network, nn.parallel.DistributedDataParallel | nn.DataParallel)
        holder = parallel or type(network).forward is nn.Module.forward  # or it holds a module and has no forward
        inner = network._modules.get("_orig_mod", network._modules.get("module") if holder else None)
        if not isinstance(inner, nn.Module):
            break
        network = inner
    require(callable(network), f"The network must be callable, network(x, time); got {type(network).__name__}.")
    if isinstance(network, nn.Module):
        _check_whole(network)
    return network  # type: ignore[return-value]


def _check_whole(module: nn.Module) -> None:
    names = {kind.__name__ for part in module.modules() for kind in type(part).__mro__}
    split = any(name in names for name in SPLIT)
    split = split or any(hasattr(p, "ds_id") or type(p.data).__name__ == "DTensor" for p in module.parameters())
    hint = "give ema= a full copy of the weights, or audit checkpoints after training"
    require(
        not split, f"The weights of this network are split over devices (FSDP or ZeRO), so it is not evaluated; {hint}."
    )


@contextlib.contextmanager
def averaged(network: object, ema: object) -> Iterator[Network]:
    """Yield the module to evaluate: the network, or with ``ema`` the one with averaged weights."""
    own = unwrapped(network) if ema is None or not isinstance(ema, nn.Module) else None
    if ema is None:
        assert own is not None
        yield own
        return
    if isinstance(ema, nn.Module):
        yield unwrapped(ema)
        return
    assert own is not None
    require(isinstance(own, nn.Module), "Averaged weights (ema=) need a network that is a torch module.")
    assert isinstance(own, nn.Module)
    shadow = getattr(ema, "shadow_params", None)
    if isinstance(ema, Mapping):
        yield Substituted(own, _named(own, ema))
    elif shadow is not None and (named := _aligned(own, list(shadow))):
        yield Substituted(own, named)
    elif all(hasattr(ema, name) for name in ("store", "copy_to", "restore")):
        held: Any = ema
        parameters = list(own.parameters())
        held.store(parameters)
        try:
            held.copy_to(parameters)
            yield own
        finally:
            held.restore(parameters)
    else:
        known = "a module, a dictionary of tensors, or an object with store, copy_to and restore"
        raise InputError(f"ema must be {known}; got {type(ema).__name__}.")


def _named(module: nn.Module, weights: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return averaged weights by the names of the module; prefixes of wrappers are taken off."""
    home, found = dict(module.named_parameters()) | dict(module.named_buffers()), {}
    for key, value in weights.items():
        name = str(key)
        while name not in home and name.startswith(PREFIXES):
            name = name.removeprefix(PREFIXES[0]).removeprefix(PREFIXES[1])
        if name in home and isinstance(value, Tensor):
            good = value.shape == home[name].shape
            require(good, f"The averaged weight {name} has another shape than the network's.")
            found[name] = value.detach().to(home[name].device, home[name].dtype)
    lacking = [name for name, _ in module.named_parameters() if name not in found]
    require(
        not lacking, f"ema holds no averaged weights for {len(lacking)} parameters of the network, {lacking[:1]} say."
    )
    return found


def _aligned(module: nn.Module, shadow: list[Tensor]) -> dict[str, Tensor]:
    """Return averaged weights in the order of the parameters, or of those that are trained; nothing if they differ."""
    every = dict(module.named_parameters())
    for kept in (every, {name: p for name, p in every.items() if p.requires_grad}):
        if len(kept) == len(shadow) and all(p.shape == s.shape for p, s in zip(kept.values(), shadow, strict=True)):
            return {name: s.detach().to(p.device, p.dtype) for (name, p), s in zip(kept.items(), shadow, strict=True)}
    return {}


def modules_of(*networks: object) -> list[nn.Module]:
    """Return all modules and submodules of what is given, each once."""
    found: dict[int, nn.Module] = {}
    for network in networks:
        for part in network.modules() if isinstance(network, nn.Module) else ():
            found[id(part)] = part
    return list(found.values())
