"""Looks at a page in headless Chromium, without a driver: a script in a copy of the page measures it from inside.

The page is shown in a frame, because a window of Chromium cannot be as narrow as a phone. A policy in the copy refuses
whatever the page would load from elsewhere, which then counts as an error.
"""

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=5000",
    "--enable-logging=stderr",
]
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
PROBE = """<script>
addEventListener("load", () => {
  const pictures = [...document.images].map(image => {
    const box = image.getBoundingClientRect();
    return {alt: image.alt, loaded: image.complete && image.naturalWidth > 0, left: box.left, right: box.right,
            height: box.height, source: image.currentSrc};
  });
  const shown = {width: document.documentElement.clientWidth, scroll: document.documentElement.scrollWidth, pictures};
  parent.postMessage(JSON.stringify(shown), "*");
});
</script>"""
FRAME = """<!doctype html><body style="margin:0"><pre id="found"></pre>
<script>addEventListener("message", event => { document.getElementById("found").textContent = event.data; });</script>
<iframe src="page.html" style="border:0; width:WIDTHpx; height:3000px"></iframe>"""


@dataclass
class Look:
    """What is to be seen of a page: its width, how far it scrolls sideways, its pictures, and messages of errors."""

    width: int
    scroll: int
    pictures: list
    errors: list

    def complaints(self):
        """What is wrong, in words."""
        found = [f"console: {text}" for text in self.errors]
        if self.scroll > self.width:
            found.append(f"the page is {self.scroll} wide, in a window of {self.width}")
        for picture in self.pictures:
            if not picture["loaded"]:
                found.append(f"not loaded: {picture['alt']}")
            elif not (picture["left"] >= 0 and picture["right"] <= self.width and picture["height"] > 50):
                found.append(f"not in view: {picture['alt']}")
        return found


def find():
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def look(content, width, folder, *, dark=False):
    """Opens a page, given as text, in a frame of this width."""
    folder.mkdir(parents=True, exist_ok=True)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    content = content.replace("<head>", f"<head>{policy}", 1).replace("</body>", f"{PROBE}</body>", 1)
    assert policy in content
    assert PROBE in content
    (folder / "page.html").write_text(content, encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    flags = [*FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width + 100},3000"]
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = [find(), *flags, "--dump-dom", (folder / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, f"the page did not answer: {done.stderr}"
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Look(**json.loads(html.unescape(found[1])), errors=errors)
