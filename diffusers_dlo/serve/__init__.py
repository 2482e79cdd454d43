# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
A server of pictures and videos whose ranks share one copy of the weights: `diffusers-dlo serve MODEL`. It needs the
extra `serve`; nothing of it is imported before it is asked for.
"""
