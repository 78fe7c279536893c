"""A headless Chromium that opens a page, runs a probe in it, and returns what it found."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
QUIET = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update"
SIMPLE = "--enable-logging=stderr --force-prefers-reduced-motion --virtual-time-budget=2000"
MISSING = BROWSER is None or sys.platform == "win32"  # Chromium does not print to a console there
needs_browser = pytest.mark.skipif(MISSING, reason="no Chromium on this machine (Debian's package is chromium)")


def probe_page(page: str, probe: str, folder: Path, size: str = "500,900") -> tuple[dict, list[str]]:
    """Return the object that a probe returns in a page once that is loaded, and the messages on the browser's console.

    The page's policy refuses foreign scripts, so it is extended by the digest of the probe.
    """
    script = f'addEventListener("load", () => {{ const probe = () => {{ {probe} }}; document.body.append('
    script += 'Object.assign(document.createElement("pre"), {id: "probed", textContent: JSON.stringify(probe())})); });'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = page.replace("script-src ", f"script-src &#x27;sha256-{digest}&#x27; ", 1)
    before, end = allowed.rsplit("</body>", 1)
    file = folder / "probed.html"
    file.write_text(f"{before}<script>{script}</script></body>{end}", encoding="utf-8")
    options = [*QUIET.split(), *SIMPLE.split(), f"--window-size={size}", f"--user-data-dir={folder}/home"]
    shown = subprocess.run([BROWSER, *options, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=60)
    found = re.search(r'<pre id="probed">(.*?)</pre>', shown.stdout, re.S)
    assert found, shown.stderr
    return json.loads(unescape(found[1])), [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
