"""Headless Chromium, spoken to through a pipe by its DevTools protocol."""

import contextlib
import functools
import http.server
import json
import os
import shutil
import subprocess
import threading

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
STATE = """(async () => {
    await document.fonts.ready;
    if (window.MathJax) await MathJax.startup.promise;
    const pictures = [...document.images].filter(i => i.complete && !i.naturalWidth);
    const page = document.documentElement;
    return {
        "broken pictures": pictures.map(i => i.src),
        "wrong formulas": [...document.querySelectorAll("mjx-merror")].map(e => e.textContent),
        "pixels beyond the window": Math.max(0, page.scrollWidth - page.clientWidth),
        "text": document.body.innerText,
        "formulas as text": [...document.querySelectorAll("p, li, td")].filter(
            e => [...e.childNodes].some(n => n.nodeType == 3 && /[$]|:math:/.test(n.data))
        ).map(e => e.innerText),
    };
})()"""


class Browser:
    """One page, loaded again and again; what goes wrong in it is collected."""

    def __init__(self, home):
        """Starts it, with its files in the folder `home`."""
        to, self._commands = os.pipe()
        self._answers, back = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={home}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to} 4>&{back}', "", CHROMIUM, *options],
            pass_fds=(to, back),
            stderr=subprocess.DEVNULL,
            env=os.environ | {"TMPDIR": str(home)},
        )
        os.close(to)
        os.close(back)
        self._rest, self._sent, self._session, self.events = b"", 0, {}, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        """Ends it."""
        with contextlib.suppress(BrokenPipeError, EOFError):
            self._session = {}
            self.call("Browser.close")
        self._process.wait(30)
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method, **params):
        """Returns the result of a method of the protocol."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._sent:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def evaluate(self, expression):
        """Returns the value of an expression in the page, when it is there."""
        how = {"awaitPromise": True, "returnByValue": True}
        return self.call("Runtime.evaluate", expression=expression, **how)["result"].get("value")

    def _next(self):
        """Returns the next message, an event or an answer."""
        while b"\0" not in self._rest:
            if not (read := os.read(self._answers, 1 << 20)):
                raise EOFError("the browser ended")
            self._rest += read
        message, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(message)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, url, width):
        """Loads `url` in a window of `width` pixels, and returns what is found there."""
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next()
        state = self.evaluate(STATE)
        host = "/".join(url.split("/")[:3])
        for event in self.events:
            kind, params = event["method"], event["params"]
            entry = params.get("entry", {})
            asked = params.get("request", entry).get("url", "")
            failed = "error" in (params.get("type"), entry.get("level"))
            if kind == "Network.requestWillBeSent":
                if not asked.startswith((host, "data:", "blob:")):
                    state.setdefault("requests to elsewhere", []).append(asked)
            elif kind == "Runtime.exceptionThrown" or (
                failed and not asked.endswith("/favicon.ico")
            ):
                state.setdefault("errors", []).append(json.dumps(params)[:500])
        return state


@contextlib.contextmanager
def served(folder):
    """Serves a folder to this machine alone, and gives its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
