"""GPUs: which there are, which of them are in sight, which way their memory takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hpctrain.doctor.check import Check
from hpctrain.hardware.gdr import Gdr
from hpctrain.hardware.nvidia import Card, Cards
from hpctrain.transport.gpus import VISIBLE, listed
from hpctrain.transport.verdicts import Told

ALL_IN_SIGHT = (
    "srun --gpus-per-node=N --ntasks-per-node=N, where the site binds tasks to GPUs also "
    "--gpu-bind=none: every rank sees all GPUs, and hpctrain takes one by the local rank"
)


def checks(
    found: Cards, on_bus: int, cupy: str | None, told: Told | None, environ: Mapping[str, str]
) -> list[Check]:
    """Return what is to be said of the GPUs `found`, of `on_bus` that the driver knows.

    `cupy`: its version, None where it is not installed; `told`: which way memory takes.
    """
    if not found.cards and not on_bus:
        return [Check("GPUs", "note", "none: training runs on the cores")]
    rows = [_there(found), _in_sight(found, on_bus, environ)]
    rows += filter(None, [_listed(found.cards, environ)])
    rows.append(_cupy(cupy))
    if told is not None:
        rows.append(_path(told))
    return rows


def gdr(found: Gdr) -> Check:
    """Return the check of GPUDirect RDMA."""
    word = {True: "may be used", False: "no", None: "not known"}[found.available]
    return Check("GPUDirect RDMA", "ok" if found.available else "note", f"{word}: {found.seen}",
                 found.remedy)  # fmt: skip


def _there(found: Cards) -> Check:
    names = Counter(card.name for card in found.cards)
    words = ", ".join(f"{count} x {name}" for name, count in names.items())
    slices = sum(len(card.slices) for card in found.cards)
    mig = f", cut into {slices} MIG slices" if slices else ""
    seen = f"{words}{mig}; driver {found.driver or 'unknown'} ({found.told_by})"
    return Check("GPUs", "ok", seen)


def _in_sight(found: Cards, on_bus: int, environ: Mapping[str, str]) -> Check:
    """Return whether GPUs of the node are hidden: from this process, or from CUDA in it."""
    words, count = listed(environ), len(found.cards)
    if on_bus > count:
        seen = f"{count} of {on_bus} GPUs: a control group hides the neighbours', CUDA IPC fails"
        return Check("GPUs in sight", "slow", seen, ALL_IN_SIGHT)
    if VISIBLE in environ and not words:
        return Check("GPUs in sight", "bad", f"none: {VISIBLE} is empty", f"unset {VISIBLE}")
    if words and len(words) < count and not words[0].startswith("MIG-"):
        seen = f"{len(words)} of {count}: {VISIBLE}={','.join(words)}"
        return Check("GPUs in sight", "note", seen, f"unset {VISIBLE}; {ALL_IN_SIGHT}")
    return Check("GPUs in sight", "ok", f"all {count}" if not words else ",".join(words))


def _listed(cards: Sequence[Card], environ: Mapping[str, str]) -> Check | None:
    """Return the fault of a CUDA_VISIBLE_DEVICES that names a GPU twice, or one that is not there.

    CUDA stops reading at such a word, and shows what came before it.
    """
    words = listed(environ)
    meant = [_meant(word, cards) for word in words]
    for word, name in zip(words, meant, strict=True):
        if name is None:
            return Check("GPUs listed", "bad", f"{VISIBLE} names {word}: there is no such GPU",
                         f"unset {VISIBLE}, or name GPUs of `nvidia-smi -L`")  # fmt: skip
    twice = [name for name, count in Counter(meant).items() if count > 1]
    if not twice:
        return None
    seen = f"{VISIBLE}={','.join(words)} names {', '.join(map(str, twice))} twice"
    return Check("GPUs listed", "bad", f"{seen}: CUDA shows none after it", "name each GPU once")


def _meant(word: str, cards: Sequence[Card]) -> str | None:
    """Return the UUID that a word of CUDA_VISIBLE_DEVICES means: a number, or how a UUID begins."""
    if word.isdigit():
        return cards[int(word)].uuid if int(word) < len(cards) else None
    names = [name for card in cards for name in (card.uuid, *card.slices)]
    # A slice's older name, MIG-GPU-UUID/1/0, tells the GPU that it is cut from.
    if word.startswith("MIG-GPU-"):
        return word if word[4:].partition("/")[0] in names else None
    return next((name for name in names if name.startswith(word)), None)


def _cupy(version: str | None) -> Check:
    if version is not None:
        return Check("CuPy", "ok", version)
    remedy = "pip install 'hpctrain[cuda12x]', or cuda13x; or train with --device cpu"
    return Check("CuPy", "bad", "not installed: GPUs cannot be used", remedy)


def _path(told: Told) -> Check:
    way, reason = told.verdict, told.verdict.reason
    seen = (
        f"same GPU {way.same_gpu}, same node {way.same_node}, across nodes {way.across}: {reason}"
    )
    slow = "staged" in (way.same_node, way.same_gpu) or bool(told.remedy)
    return Check("CUDA-aware MPI", "slow" if slow else "ok", seen, told.remedy)
