"""Screenshots of five pages of build/site, wide and narrow; fails on broken images, raw directives, page-wide scroll.

python docs/screenshots.py FOLDER [--browser /usr/bin/chromium]
"""

import argparse
import functools
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import sync_playwright

SITE = Path(__file__).resolve().parents[1] / "build/site"
PAGES = ("", "quickstart/", "rollout/", "options/", "api/")
WIDTHS = (1280, 390)
BROKEN = "() => [...document.images].filter(i => !i.naturalWidth).map(i => i.src)"
WIDER = "() => document.documentElement.scrollWidth > document.documentElement.clientWidth"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--browser", help="Default: playwright's chromium.")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
        for width in WIDTHS:
            page = browser.new_page(viewport={"width": width, "height": 900})
            for name in PAGES:
                page.goto(f"http://127.0.0.1:{server.server_port}/{name}", wait_until="load")
                page.screenshot(path=args.folder / f"{name.strip('/') or 'index'}_{width}.png")
                text = page.inner_text("article")
                faults = page.evaluate(BROKEN) + [word for word in ("[[autodoc]]", ":::", "<!--") if word in text]
                faults += ["wider than the window"] * page.evaluate(WIDER)
                found += [f"{name or 'index'} at {width}: {fault}" for fault in faults]
        browser.close()
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
