# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Takes the picture of the server's page: the demo on two ranks, with pictures and a video done and others at work. Needs
what the tests of the page need. From the repository's root: `python docs/assets/page.py`
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image


sys.path.insert(0, str(Path(__file__).parents[2]))

from diffusers_dlo.serve.options import ServeOptions
from tests.serve.browser import Browser, PageServer, wait_until


OUT = Path(__file__).parent / "page.png"
FOX = "a red fox runs through fresh snow at sunrise, its breath visible in the cold air"
BOAT = "a paper boat drifts down a rainy street while people with umbrellas pass by"
LIGHTHOUSE = "an old lighthouse on a cliff, waves breaking below, seen from a slow flying drone"
ROBOT = "a robot arm pours coffee into a blue cup on a wooden table next to the window"


def main() -> None:
    profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with profile, PageServer(ServeOptions(ranks=2), ranks=True) as server:
        browser = Browser(Path(profile.name))
        try:
            browser.viewport(1280, 1060)
            browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
            browser.get(server.address)
            browser.see("#server", "Ready")
            browser.ask(prompt=FOX, num_inference_steps="8", seed="1")
            browser.ask("video", prompt=BOAT, num_frames="17", seed="3")
            browser.ask(prompt=LIGHTHOUSE, num_inference_steps="12", n="2", seed="6")
            browser.see("#gallery-count", "4")
            browser.ask(prompt=ROBOT, size="256x256", num_inference_steps="60", guidance_scale="4", n="3", seed="41")
            wait_until(lambda: server.service.scheduler.fleet.idle == [], "both ranks compute")
            browser.execute_script("document.activeElement.blur()")
            browser.see("#ranks", "step 24")
            png = browser.get_screenshot_as_png()
        finally:
            browser.quit()
    # Few colours are enough for a page, and noise takes many bytes.
    Image.open(io.BytesIO(png)).convert("RGB").quantize(48, dither=Image.Dither.NONE).save(OUT, optimize=True)
    print(f"{OUT.name}: {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
