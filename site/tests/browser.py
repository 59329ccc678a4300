"""A folder of pages served on a free port, and what a headless Chromium says of each."""

from __future__ import annotations

import json
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from urllib.parse import urlsplit

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium_axe_python import Axe

HEIGHT = 900
# Of the page that is open: what is wider than the window, images that are not there, formulas that
# are not typeset or that MathJax could not read, code of which the end is beyond an edge, words in
# tables that go on in the next line.
LOOK = """
const done = arguments[arguments.length - 1];
// WebDriver may return while the page is still loading.
const loaded = document.readyState === "complete"
  ? Promise.resolve()
  : new Promise(resolve => window.addEventListener("load", resolve));
loaded.then(() => window.MathJax?.startup?.promise).then(() => {
  // On a narrow page it is the content that scrolls.
  const boxes = [document.documentElement, ...document.querySelectorAll(".content")];
  const wide = Math.max(...boxes.map(box => box.scrollWidth - box.clientWidth));
  const words = [];
  for (const cell of document.querySelectorAll("table.docutils td, table.docutils th")) {
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      for (const word of texts.currentNode.data.matchAll(/[^\\s\\-\u2013/]+/g)) {
        const range = document.createRange();
        range.setStart(texts.currentNode, word.index);
        range.setEnd(texts.currentNode, word.index + word[0].length);
        words.push([word[0], new Set([...range.getClientRects()].map(box => box.top)).size]);
      }
    }
  }
  const formulas = [...document.querySelectorAll("span.math, div.math")];
  done({
    address: location.href,
    wide: wide,
    images: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
    plain: formulas.filter(f => !f.querySelector("mjx-container")).map(f => f.textContent),
    errors: [...document.querySelectorAll("mjx-merror")].map(e => e.textContent),
    formulas: formulas.length,
    broken: words.filter(([_, lines]) => lines > 1).map(([word]) => word),
    cut: [...document.querySelectorAll("article pre")]
      .filter(pre => pre.scrollWidth > pre.clientWidth).map(pre => pre.textContent),
    lost: [...document.querySelectorAll("a[href]")].map(a => a.href),
    ids: [...document.querySelectorAll("[id]")].map(e => e.id),
  });
});
"""

# Opens all that a page can show for axe, and removes gradients, on which it judges no contrast.
PREPARE = """
document.querySelectorAll("details").forEach(details => { details.open = true; });
const style = document.head.appendChild(document.createElement("style"));
style.textContent = "* { background-image: none !important; }";
"""
# Scrolls an element into view and returns its place on the page.
PLACE = """
const [selector, done] = arguments, element = document.querySelector(selector);
element.scrollIntoView({block: "center", behavior: "instant"});
(element.decode ? element.decode() : Promise.resolve()).then(() => {
  const box = element.getBoundingClientRect();
  const place = {x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height};
  done({...place, scale: 1});
});
"""
# Left out: a browser itself lets the keyboard scroll; the corner of a table has no heading.
RULES = {"scrollable-region-focusable": False, "empty-table-header": False}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which `folder` is served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class Browser:
    """A headless Chromium, Debian's; one window."""

    def __init__(self):
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        # A driver that is named is not looked for, nor downloaded.
        self.driver = webdriver.Chrome(options, Service("/usr/bin/chromedriver"))
        self.driver.set_script_timeout(60)
        self.driver.get("about:blank")  # its own first page may still be on its way

    def close(self) -> None:
        self.driver.quit()

    def open(self, url: str, width: int, theme: str = "light") -> dict:
        """Opens `url` in a window of that width; what LOOK finds there, and `faults`."""
        wanted = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for log in ("browser", "performance"):
            self.driver.get_log(log)  # what an earlier page said
        self.driver.get(url)
        found = self.driver.execute_async_script(LOOK)
        if found["address"] != url:
            raise AssertionError(f"{url}: the browser is at {found['address']}")
        found["faults"] = [*self._said(), *self._requests(urlsplit(url).netloc)]
        if found["wide"] > 0:
            found["faults"].append(f"wider than {width} pixels by {found['wide']}")
        found["faults"] += [f"no image: {source}" for source in found["images"]]
        found["faults"] += [f"broken in a table: {word}" for word in found["broken"]]
        found["faults"] += [f"not typeset: {text}" for text in found["plain"]]
        found["faults"] += [f"not mathematics: {text}" for text in found["errors"]]
        return found

    def axe(self) -> list[str]:
        """What axe-core finds wrong with the page that is open: contrast, landmarks, names."""
        self.driver.execute_script(PREPARE)
        axe = Axe(self.driver)
        axe.inject()
        rules = {rule: {"enabled": enabled} for rule, enabled in RULES.items()}
        found = axe.run(options=json.dumps({"rules": rules}))["violations"]
        return [f"{v['id']}: {node['html']}" for v in found for node in v["nodes"]]

    def picture(self, selector: str) -> Image.Image:
        """The first such element as it is shown, in shades of gray."""
        place = self.driver.execute_async_script(PLACE, selector)
        shot = {"format": "png", "clip": place}
        png = self.driver.execute_cdp_cmd("Page.captureScreenshot", shot)["data"]
        return Image.open(BytesIO(b64decode(png))).convert("L")

    def _said(self) -> Iterator[str]:
        for entry in self.driver.get_log("browser"):
            if entry["level"] in ("SEVERE", "WARNING"):
                yield f"console: {entry['message']}"

    def _requests(self, host: str) -> Iterator[str]:
        for entry in self.driver.get_log("performance"):
            event = json.loads(entry["message"])["message"]
            about = event["params"]
            if event["method"] == "Network.requestWillBeSent":
                address = urlsplit(about["request"]["url"])
                if address.scheme.startswith("http") and address.netloc != host:
                    yield f"a request that leaves the site: {about['request']['url']}"
            elif event["method"] == "Network.responseReceived":
                if about["response"]["status"] >= 400:
                    yield f"{about['response']['status']}: {about['response']['url']}"
            elif event["method"] == "Network.loadingFailed":
                yield f"a request failed: {about['errorText']}"
