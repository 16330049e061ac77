"""GPUs: how many, which of them are visible, and the path of messages from their memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hpctrain.doctor.check import Check
from hpctrain.hardware.gdr import Gdr
from hpctrain.hardware.nvidia import Card, Cards
from hpctrain.transport.device.gpus import VISIBLE, listed
from hpctrain.transport.gpu_probe.verdicts import ProbeResult

SHOW_ALL = (
    "srun --gpus-per-node=N --ntasks-per-node=N, where the site binds tasks to GPUs also "
    "--gpu-bind=none: every rank sees all GPUs, and hpctrain takes one by the local rank"
)


def checks(
    cards: Cards,
    on_bus: int,
    cupy: str | None,
    gpu_paths: ProbeResult | None,
    environ: Mapping[str, str],
) -> list[Check]:
    """Return the checks of the GPUs `cards`, of `on_bus` that the driver knows.

    `cupy`: its version, None where it is not installed; `gpu_paths`: None where no trial ran.
    """
    if not cards.cards and not on_bus:
        return [Check("GPUs", "note", "none: training runs on the cores")]
    rows = [_inventory(cards), _visible(cards, on_bus, environ)]
    rows += filter(None, [_visible_list(cards.cards, environ)])
    rows.append(_cupy(cupy))
    if gpu_paths is not None:
        rows.append(_path(gpu_paths))
    return rows


def gdr(support: Gdr) -> Check:
    """Return the check of GPUDirect RDMA."""
    word = {True: "may be used", False: "no", None: "not known"}[support.available]
    text = f"{word}: {support.evidence}"
    return Check("GPUDirect RDMA", "ok" if support.available else "note", text, support.remedy)


def _inventory(cards: Cards) -> Check:
    names = Counter(card.name for card in cards.cards)
    words = ", ".join(f"{count} x {name}" for name, count in names.items())
    slices = sum(len(card.slices) for card in cards.cards)
    mig = f", cut into {slices} MIG slices" if slices else ""
    observed = f"{words}{mig}; driver {cards.driver or 'unknown'} ({cards.data_source})"
    return Check("GPUs", "ok", observed)


def _visible(cards: Cards, on_bus: int, environ: Mapping[str, str]) -> Check:
    """Return the check for GPUs of the node hidden from this process, or from CUDA in it."""
    words, count = listed(environ), len(cards.cards)
    if on_bus > count:
        observed = f"{count} of {on_bus} GPUs: a control group hides the neighbours'"
        return Check("GPUs in sight", "slow", f"{observed}, CUDA IPC fails", SHOW_ALL)
    if VISIBLE in environ and not words:
        return Check("GPUs in sight", "bad", f"none: {VISIBLE} is empty", f"unset {VISIBLE}")
    if words and len(words) < count and not words[0].startswith("MIG-"):
        observed = f"{len(words)} of {count}: {VISIBLE}={','.join(words)}"
        return Check("GPUs in sight", "note", observed, f"unset {VISIBLE}; {SHOW_ALL}")
    return Check("GPUs in sight", "ok", f"all {count}" if not words else ",".join(words))


def _visible_list(cards: Sequence[Card], environ: Mapping[str, str]) -> Check | None:
    """Return the fault of a CUDA_VISIBLE_DEVICES that names a GPU twice, or one that is not there.

    CUDA stops reading at such a word, and shows the GPUs before it.
    """
    words = listed(environ)
    uuids = [_uuid_of(word, cards) for word in words]
    for word, name in zip(words, uuids, strict=True):
        if name is None:
            return Check("GPUs listed", "bad", f"{VISIBLE} names {word}: there is no such GPU",
                         f"unset {VISIBLE}, or name GPUs of `nvidia-smi -L`")  # fmt: skip
    repeated = [name for name, count in Counter(uuids).items() if count > 1]
    if not repeated:
        return None
    observed = f"{VISIBLE}={','.join(words)} names {', '.join(map(str, repeated))} twice: "
    observed += "CUDA shows none after it"
    return Check("GPUs listed", "bad", observed, "name each GPU once")


def _uuid_of(word: str, cards: Sequence[Card]) -> str | None:
    """Return the UUID for a word of CUDA_VISIBLE_DEVICES: an index or a prefix of a UUID."""
    if word.isdigit():
        return cards[int(word)].uuid if int(word) < len(cards) else None
    names = [name for card in cards for name in (card.uuid, *card.slices)]
    # A slice's older name, MIG-GPU-UUID/1/0, holds the UUID of its GPU.
    if word.startswith("MIG-GPU-"):
        return word if word[4:].partition("/")[0] in names else None
    return next((name for name in names if name.startswith(word)), None)


def _cupy(version: str | None) -> Check:
    if version is not None:
        return Check("CuPy", "ok", version)
    remedy = "pip install 'hpctrain[cuda12x]', or cuda13x; or train with --device cpu"
    return Check("CuPy", "bad", "not installed: GPUs cannot be used", remedy)


def _path(gpu_paths: ProbeResult) -> Check:
    verdict, reason = gpu_paths.verdict, gpu_paths.verdict.reason
    classes = f"same GPU {verdict.same_gpu}, same node {verdict.same_node}"
    observed = f"{classes}, across nodes {verdict.across}: {reason}"
    is_slow = "staged" in (verdict.same_node, verdict.same_gpu) or bool(gpu_paths.remedy)
    return Check("CUDA-aware MPI", "slow" if is_slow else "ok", observed, gpu_paths.remedy)
