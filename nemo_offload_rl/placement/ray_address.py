"""Joins the Ray cluster that RAY_ADDRESS names, after checking that its head answers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
from ray._private.services import canonicalize_bootstrap_address

from nemo_offload_rl.placement.nodes import answers_at

_ANSWER_TIMEOUT_S = 10.0
_NOT_HEADS = ("auto", "local", "")
_HOW = "it has to be the HOST:PORT that `ray start --head` prints (port 6379 unless it was given another), or auto"
_REMEDY = "correct RAY_ADDRESS, or unset it to run on this machine alone"


def join_ray(options: Mapping[str, Any]) -> None:
    """Connects to the Ray cluster that RAY_ADDRESS names.

    Ray itself would try for two minutes to reach a head that does not answer, and then end the process.

    Args:
        options: arguments of `ray.init`.

    Raises:
        ValueError: RAY_ADDRESS is no address of a head, or no head answers there.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    _require_head(address)
    try:
        ray.init(**options)
    except ConnectionError as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"RAY_ADDRESS is {address}, but Ray cannot join that cluster: {reason}; {_REMEDY}.") from error


def _require_head(address: str) -> None:
    if "://" in address:
        raise ValueError(
            f"RAY_ADDRESS is {address}, but a run joins Ray as a driver, not through Ray Client (ray://) or the job "
            f"server (http://): {_HOW}."
        )
    host, _, port = address.rpartition(":")
    if address not in _NOT_HEADS and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"RAY_ADDRESS is {address}, which names no head of a Ray cluster: {_HOW}.")
    try:
        found = canonicalize_bootstrap_address(None)  # as ray.init reads RAY_ADDRESS
    except ConnectionError as error:
        raise ValueError(f"RAY_ADDRESS is {address}, but no Ray runs on this machine; start one, {_REMEDY}.") from error
    if found is None:  # ray.init starts Ray here
        return
    host, _, port = found.rpartition(":")
    if not answers_at(host.strip("[]"), int(port), _ANSWER_TIMEOUT_S):
        meant = "" if found == address else f", which stands for {found}"
        raise ValueError(
            f"RAY_ADDRESS is {address}{meant}, but no head of a Ray cluster answers there within "
            f"{_ANSWER_TIMEOUT_S:.0f} s; start it with `ray start --head --port={port}`, {_REMEDY}."
        )
