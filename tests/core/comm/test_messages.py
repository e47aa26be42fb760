"""What travels between ranks arrives as it was sent, and nothing that arrives runs code."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from summit_train.core.comm import World, messages, open_world
from summit_train.core.errors import AgreedError
from summit_train.data.video.span import WHOLE
from summit_train.spec import smallest_spec
from tests.worlds import joined, needs_ranks, received


def _messages(value: object) -> list[np.ndarray[Any, Any]]:
    sent: list[np.ndarray[Any, Any]] = []
    messages.send(value, lambda piece: sent.append(piece.copy()))
    return sent


STRUCTURED = np.array([(1, 2.5, "é")], dtype=[("a", "<i8"), ("b", "<f4"), ("c", "<U3")])
VALUES = [
    None, True, False, 0, -1, 1 << 63, -(1 << 10_000), 1.5, math.inf, -0.0, "", "é\U0001f600", "a\udcffb",
    "\udc80\udcff", [], [1, [2.0, ("dict", {"tuple": "int"})]],
    (), ((3, 4), [()]), {1: "a", (2, None): {}, "array": [1]}, {"dict": {}},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_arrives_as_it_was_sent_in_one_message_if_it_is_short(value: object) -> None:
    returned = received(value)
    assert returned == value and type(returned) is type(value) and (type(value) is int or repr(returned) == repr(value))
    assert len(_messages(value)) <= 2


def test_numbers_and_mappings_of_libraries_arrive_as_plain_ones() -> None:
    """Such as the mean of an array, and a state dict in a checkpoint of an older version."""
    assert math.isnan(received(math.nan))
    returned = received([np.float64(1 / 3), OrderedDict(b=1, a=2)])
    assert returned == [1 / 3, {"b": 1, "a": 2}] and list(map(type, returned)) == [float, dict]
    assert list(returned[1]) == ["b", "a"]


@pytest.mark.parametrize("piece", [1000, 1 << 20])
def test_arrays_and_tensors_arrive_bit_for_bit(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Those of any memory order and of none; large ones in pieces."""
    monkeypatch.setattr(messages, "PIECE", piece)
    random = torch.Generator().manual_seed(1)
    large = torch.randn(2, 3, 100, 100, generator=random).to(memory_format=torch.channels_last)
    tensors = [large, large.bfloat16(), large > 0, torch.tensor(7), torch.zeros(0, 3)]
    tensors.append(torch.nn.Parameter(large.double()))
    arrays = [np.asfortranarray(large[0].numpy()), STRUCTURED, np.zeros(2, "V32"), np.array(3, ">i2"), np.zeros((2, 0))]
    arrays += [np.arange(size, dtype=np.uint16).view(np.uint8) for size in ((1 << 15) - 1, 1 << 15)]  # small, large
    frozen = np.arange(50_000)
    frozen.flags.writeable = False
    value = {"tensors": tensors, "arrays": [*arrays, frozen]}
    assert max(map(len, _messages(value))) <= piece
    returned = received(value)
    for tensor, copy in zip(tensors, returned["tensors"], strict=True):
        assert copy.dtype == tensor.dtype and torch.equal(copy, tensor.detach())
    for array, copy in zip(value["arrays"], returned["arrays"], strict=True):
        assert (copy.dtype, copy.shape, copy.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_of_a_tensor_without_numbers_type_and_shape_arrive() -> None:
    sent = {"a": torch.empty(1 << 40, 3, dtype=torch.float64, device="meta"), "b": torch.ones(2)}
    assert sum(map(len, _messages(sent))) < 1000
    found = received(sent)
    assert found["a"].is_meta and found["a"].shape == (1 << 40, 3) and found["a"].dtype == torch.float64
    assert torch.equal(found["b"], torch.ones(2))


REFUSED = [
    len, Path, np.array([None]), ValueError("x"), World(), WHOLE, AgreedError("x"), smallest_spec(), torch.Size([2]),
    {3}, b"", np.float32(1), Path("x"), object(),
]  # fmt: skip


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_a_value_of_another_type_is_refused_before_anything_is_sent(value: object) -> None:
    sent: list[object] = []
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    with pytest.raises(TypeError, match=f"^{name} cannot be sent to other ranks"):
        messages.send([{"a": value}], sent.append)
    assert sent == []


FORMS: list[dict[str, Any]] = [
    {}, {"eval": "1"}, {"type": ["subprocess", "Popen", "true"]}, {"array": ["__import__('os').system('true')", [1]]},
    {"array": ["|O", [1]]}, {"tensor": ["load", [1]]}, {"meta": ["__name__", [1]]}, {"tuple": [], "dict": []},
    {"dict": [[[], 1]]},
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_no_rank_of_ours_sends_is_refused(form: dict[str, Any]) -> None:
    text = np.frombuffer(json.dumps(form).encode(), np.uint8)
    sent = iter([np.array([len(text), 0]).view(np.uint8), text])
    with pytest.raises((TypeError, ValueError, KeyError)):
        messages.receive(lambda piece: np.copyto(piece, next(sent)))


@pytest.mark.parametrize("backend", [pytest.param("horovod", marks=needs_ranks), "torch"])
def test_both_worlds_carry_large_and_small_values_between_sums(backend: str) -> None:
    def work() -> int:
        messages.PIECE = 1 << 20
        world = open_world()
        large = torch.arange(700_000) + world.rank
        wait = world.start_mean(torch.ones(1 << 20), "mean")
        shared = world.broadcast({"large": large, "path": "a\udcff"})
        own: dict[str, torch.Tensor] = {"large": torch.full((20_000,), float(world.rank))}
        own |= {"kernel": torch.full((2, 3, 4, 5), float(world.rank)), "n": torch.tensor(world.rank)}
        own["kernel"] = own["kernel"].contiguous(memory_format=torch.channels_last)
        if world.rank == 0:
            own["kernel"] += torch.arange(120.0).view(2, 3, 4, 5)
        pointers = [tensor.data_ptr() for tensor in own.values()]
        world.broadcast_tensors(own)
        assert torch.equal(own["kernel"], torch.arange(120.0).view(2, 3, 4, 5)) and own["n"].item() == 0
        assert not own["large"].any()
        assert [tensor.data_ptr() for tensor in own.values()] == pointers
        gathered = world.gather((world.rank, large.numpy()[::2], (world.rank, 9)))
        wait()
        assert shared["path"] == "a\udcff" and torch.equal(shared["large"], torch.arange(700_000))
        for rank, (number, array, span) in enumerate(gathered or ()):
            assert (number, span) == (rank, (rank, 9)) and np.array_equal(array, np.arange(700_000)[::2] + rank)
        assert (gathered is None) == (world.rank > 0)
        world.close()
        return 0

    status, output = joined(3, work, backend)
    assert status == 0, output


def test_rank_0_waits_for_the_messages_of_all_ranks_together() -> None:
    """Each is begun before the first is waited for: lengths, then texts. Large arrays follow, one by one."""
    values = [f"rank {rank}" for rank in range(4)] + [np.arange(20_000)]
    sent = {source: iter(_messages(value)) for source, value in enumerate(values) if source}
    events = list[tuple[str, int]]()

    def start(piece: np.ndarray[Any, Any], source: int) -> Any:
        def wait() -> None:
            events.append(("wait", source))
            piece[:] = next(sent[source])

        events.append(("start", source))
        return wait

    gathered = messages.gather(values[0], 0, 5, lambda piece: None, start)
    assert gathered is not None and gathered[:4] == values[:4] and np.array_equal(gathered[4], values[4])
    together = [(what, source) for what in ("start", "wait") for source in range(1, 5)]
    assert events == [*together, *together, ("start", 4), ("wait", 4)]
