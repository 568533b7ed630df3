"""Making a pool of SGLang engines, attached or started."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rollout.engines.sglang.client import SGLangClient
from rollout.engines.sglang.launch import EngineProcess, LaunchPlan, device_shares
from rollout.engines.sglang.member import Member
from rollout.engines.sglang.model import ModelFacts, read_model_facts
from rollout.engines.sglang.pool import SGLangPool
from rollout.engines.sglang.settings import SGLangSettings, api_key
from rollout.engines.synchronous import SynchronousEngine
from rollout.event_loop import EventLoopThread
from rollout.weights import EngineControl, WeightUpdater, WeightUpdateSettings

__all__ = ["create_sglang_engine", "create_sglang_pool", "visible_devices"]


def visible_devices() -> list[str]:
    """The CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def create_sglang_pool(
    model_dir: str | Path,
    settings: SGLangSettings,
    *,
    devices: Sequence[str] | None = None,
    updates: WeightUpdateSettings | None = None,
) -> SGLangPool:
    """A pool that has not been started. Nothing of it needs sglang in this process.

    `devices`: what engines that are started share; None: the last of those that this process sees.
    `updates`: how it takes new weights; None: it takes none.

    Raises:
        NotFound, Corrupt, InvalidArgument: the model's folder, as `read_model_facts`.
        MissingDependency: engines are to be started and there is no sglang; or no aiohttp.
    """
    settings.check_installed()
    model = read_model_facts(model_dir)

    def connect(address: str) -> SGLangClient:
        return SGLangClient(
            address, model, request_timeout_s=settings.request_timeout_s, api_key=api_key()
        )

    connect("http://unused")  # says now where aiohttp is missing
    plans = [] if settings.urls else _plans(Path(model_dir), model, settings, devices)
    members = [
        Member(
            number=number,
            connect=connect,
            slots=asyncio.Semaphore(settings.concurrency),
            url=settings.urls[number] if settings.urls else None,
            process=EngineProcess(plans[number]) if plans else None,
        )
        for number in range(settings.num_engines)
    ]
    if updates is None:
        return SGLangPool(members, settings.pool, model=model)
    config = json.loads((Path(model_dir) / "config.json").read_bytes())
    return SGLangPool(
        members,
        settings.pool,
        model=model,
        updates=WeightUpdater(updates, config),
        control=_control,
    )


def _control(member: Member) -> EngineControl:
    key = api_key()
    return EngineControl(
        member.address,
        local=member.is_local or _is_loopback(member.address),
        headers={} if key is None else {"Authorization": f"Bearer {key}"},
    )


def _is_loopback(address: str) -> bool:
    """Whether an engine that is attached runs on this host: nobody else has such an address."""
    return urlsplit(address).hostname in ("localhost", "127.0.0.1", "::1")


def _plans(
    model_dir: Path, model: ModelFacts, settings: SGLangSettings, devices: Sequence[str] | None
) -> list[LaunchPlan]:
    folder = settings.log_dir or Path(tempfile.mkdtemp(prefix="ledger-engines-"))
    shares = device_shares(
        visible_devices() if devices is None else devices,
        settings.num_engines,
        settings.num_gpus_per_engine,
    )
    return [
        LaunchPlan(
            model_dir=model_dir,
            log=folder / f"engine-{number}.log",
            words=settings.server_words(has_experts=model.num_experts > 0),
            python=settings.python,
            module=settings.module,
            environment=settings.environment,
            devices=None if shares is None else shares[number],
            ready_timeout_s=settings.ready_timeout_s,
        )
        for number in range(settings.num_engines)
    ]


def create_sglang_engine(
    model_dir: str | Path, settings: SGLangSettings | None = None
) -> SynchronousEngine:
    """A started pool for callers that wait. Raises as `create_sglang_pool`, `SGLangPool.start`."""
    pool = create_sglang_pool(model_dir, settings or SGLangSettings())
    loop = EventLoopThread("sglang")
    try:
        loop.call(pool.start())
    except BaseException:
        loop.close()
        raise
    return SynchronousEngine(pool, loop, check=pool.check)
