# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the names by which copies, gathers and waits show in a profile of `torch.profiler`. Must not cost anything while
nobody profiles.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


_NOTHING: AbstractContextManager[object] = nullcontext()


def label(what: str, unit: object) -> AbstractContextManager[object]:
    """The context of what is done for `unit`: in a profile of this thread it shows as `dlo: WHAT UNIT`."""
    if not torch.autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"dlo: {what} {unit}")
