# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
What the process has imported from which ranks are forked, so that no rank does. Imports make the collector of garbage
look through everything several times, which takes a rank longer than all it does for its test: none runs meanwhile,
and what is here after them counts as no garbage, in the ranks too.
"""

import gc


gc.disable()

import pytest  # noqa: E402, F401
import torch.distributed  # noqa: E402, F401
from diffusers import Cosmos3OmniPipeline, FluxPipeline, WanPipeline  # noqa: E402, F401

import diffusers_dlo  # noqa: E402, F401
from tests import checks, toys, zoo  # noqa: E402, F401


gc.collect()
gc.freeze()
gc.enable()
