"""Looks for private rows, labels and column names in packets."""

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from atoll.core.messages import Packet
from atoll.runs.parts import Parts

__all__ = ["leaks"]

ROW = 4  # consecutive numbers that identify a row
LABELS = 12  # consecutive labels that identify labels


def leaks(parts: Parts, packets: Iterable[tuple[str, str, Packet]]) -> list[str]:
    """What is private in the packets of a run: rows, labels, names of own columns.

    A packet that holds training, validation or test rows, as they are or scaled, is found, in any
    precision; so is one with labels in their order or sorted.
    """
    rows, labels, sorted_labels = _private(parts)
    names = _own_columns(parts)
    leaked = []
    for sender, action, packet in packets:
        for line in _numbers(packet):
            if np.isin(_windows(line, ROW), rows).any():
                leaked.append(f"a row in {action} from {sender}")
            if np.isin(_windows(line, LABELS), labels).any():
                leaked.append(f"labels in {action} from {sender}")
            flat = np.sort(line.reshape(-1))
            if any(np.array_equal(flat, one) for one in sorted_labels if len(one) == len(flat)):
                leaked.append(f"labels in another order in {action} from {sender}")
        leaked += [f"{n} in {action}" for n in names if f'"{n}"'.encode() in packet.header]
    return leaked


def _windows(values: np.ndarray, width: int) -> np.ndarray:
    """A hash of every `width` consecutive numbers of the last axis; equal numbers are left out."""
    lines = np.ascontiguousarray(values, dtype=np.float32) + np.float32(0)  # no minus zero
    if lines.ndim == 0 or lines.shape[-1] < width:
        return np.empty(0, dtype=np.uint64)
    pieces = np.lib.stride_tricks.sliding_window_view(lines, width, axis=-1).reshape(-1, width)
    pieces = np.ascontiguousarray(pieces[(pieces != pieces[:, :1]).any(1)])
    odd = np.random.default_rng(0).integers(2**63, size=width // 2, dtype=np.uint64) * 2 + 1
    words = pieces.view(np.uint64)
    words = (words ^ (words >> np.uint64(29))) * odd
    return np.unique((words ^ (words >> np.uint64(32))).sum(-1, dtype=np.uint64))


def _private(parts: Parts) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Hashes of all rows of all clients, raw and scaled; hashes of labels; sorted labels."""
    rows, labels, sorted_labels = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for id in parts.scenario.clients:
        for part, places in _held(parts, id):
            raw = parts.dataset.x[places]
            raw = raw.reshape(len(places), math.prod(raw.shape[1:]))
            blocks = (part.x.flatten(1), part.own, part.all.flatten(1), torch.from_numpy(raw))
            rows += [_windows(block.numpy(), ROW) for block in blocks]
            y = parts.dataset.y[places]  # a site may lack them
            labels += [_windows(y, LABELS), _windows(part.y.numpy(), LABELS)]  # raw and scaled
            if len(y) >= LABELS and len({*y.tolist()}) > 1:
                sorted_labels.append(np.sort(y))
    return np.concatenate(rows), np.concatenate(labels), sorted_labels


def _held(parts: Parts, id: str) -> list[tuple[Any, np.ndarray]]:
    """The training, validation and test rows of a client, each with its row numbers."""
    site = parts.site(id)
    arrays = [
        (rows_of(stage), places)
        for stage, holding in enumerate(parts.scenario.holdings[id])
        for rows_of, places in ((site.train, holding.train), (site.valid, holding.valid))
    ]
    tests = parts.scenario.tests[id]
    return arrays + [(site.test(task), places) for task, places in enumerate(tests)]


def _own_columns(parts: Parts) -> set[str]:
    """The names of the columns that only some clients have."""
    columns = parts.dataset.columns
    holdings = [stage for stages in parts.scenario.holdings.values() for stage in stages]
    return {columns[i] for holding in holdings for i in holding.own} if columns else set()


def _numbers(packet: Packet) -> list[np.ndarray]:
    """The numbers of a packet in lines: tensors, their columns, and lists in the header."""
    lines = list[np.ndarray]()
    for tensor in load(packet.block).values() if packet.block else ():
        values = tensor.double().numpy()
        lines += [values.reshape(-1)]
        lines += [values.reshape(len(values), -1).T] if values.ndim > 1 and values.size else []
    return [*lines, *_lists(json.loads(packet.header))]


def _lists(value: Any) -> list[np.ndarray]:
    if isinstance(value, dict):
        return [one for each in value.values() for one in _lists(each)]
    if isinstance(value, list) and value:
        if all(isinstance(each, int | float) for each in value):
            return [np.asarray(value, dtype=np.float64)]
        return [one for each in value for one in _lists(each)]
    return []
