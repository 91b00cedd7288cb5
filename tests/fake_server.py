"""A server for the probe, run as a script: ``fake_server.py --port N SETTINGS_JSON``. Imports nothing of the package.

``ready_after`` seconds (None: never), ``dies`` with an exit code after ``lives`` seconds, ``accepted`` proposals of
three per round, ``metrics`` and ``details`` (SGLang's, in answers) shown or not, ``log``: a file for signals it gets,
``chat``: whether it has a template.
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer

DEFAULTS = {"ready_after": 0, "lives": 60, "dies": 0, "accepted": 1, "metrics": True, "details": False, "chat": True}
STARTED = time.monotonic()
ROUNDS_PER_ANSWER = 5
asked = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/health":
            late = settings["ready_after"]
            self.answer(200 if late is not None and time.monotonic() - STARTED >= late else 503, "")
        elif self.path == "/end":
            os._exit(settings["dies"])
        elif self.path == "/v1/models":
            self.answer(200, json.dumps({"data": [{"id": "fake"}]}))
        elif self.path == "/metrics" and settings["metrics"]:
            self.answer(200, page(len(asked)))
        else:
            self.answer(404, "")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "chat" in self.path and not settings["chat"]:
            return self.answer(400, "no template")
        assert body["model"] == "fake"
        asked.append(self.path)
        answer = {"choices": [{}]}
        if settings["details"]:
            counted = {"spec_verify_ct": 5, "spec_num_proposed_drafts": 15}
            answer["sglext"] = {"spec_tokens_details": counted | {"spec_num_correct_drafts": 5 * settings["accepted"]}}
        return self.answer(200, json.dumps(answer))

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    def server_bind(self):
        TCPServer.server_bind(self)  # and no question to a name server


def page(answers):
    rounds = 100 + ROUNDS_PER_ANSWER * answers
    values = {
        "drafts": rounds,
        "draft_tokens": 3 * rounds,
        "accepted_tokens": 7 + settings["accepted"] * (rounds - 100),
    }
    lines = [f'vllm:spec_decode_num_{name}_total{{engine="{e}"}} {v / 2}' for name, v in values.items() for e in "01"]
    lines += [f"sglang:spec_verify_calls_total {rounds}"]
    lines += [f"sglang:generation_tokens_total {answers + (1 + settings['accepted']) * (rounds - 100)}"]
    return "\n".join(lines) + "\n"


def note(number, _):
    with Path(settings["log"]).open("a") as log:
        log.write(f"{signal.Signals(number).name}\n")
    if number == signal.SIGTERM:
        os._exit(settings["dies"])


if __name__ == "__main__":
    settings = DEFAULTS | json.loads(sys.argv[3])
    if "log" in settings:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, note)
        Path(settings["log"]).write_text(f"{os.getpid()}\n")
    server = Server(("127.0.0.1", int(sys.argv[2])), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    end = STARTED + settings["lives"]
    while time.monotonic() < end:
        time.sleep(0.05)
    os._exit(settings["dies"])
