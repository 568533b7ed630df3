"""Stands for `python -m sglang.launch_server` in tests of what starts it; run as a script.

It serves what the client asks at the start, and does what LAUNCHED_DO says before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ANSWERS = {
    "/server_info": {"version": "0.5.23", "max_req_input_len": 122},
    "/model_info": {"model_type": "qwen3", "weight_version": "default"},
    "/health_generate": {},
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(ANSWERS[self.path]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    words = sys.argv[1:]
    do = os.environ.get("LAUNCHED_DO", "")
    print("words:", *words, flush=True)
    print("devices:", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    if do == "die":
        print("RuntimeError: no memory left on the device", file=sys.stderr, flush=True)
        sys.exit(3)
    folder = Path(words[words.index("--model-path") + 1])
    port = int(words[words.index("--port") + 1])
    child = subprocess.Popen(["sleep", "600"])
    if do == "taken" and not (folder / "taken").exists():
        (folder / "taken").touch()
        print("[Errno 98] error while attempting to bind: Address already in use", flush=True)
        child.kill()
        sys.exit(1)
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    (folder / "pids").write_text(f"{os.getpid()} {child.pid}")
    server.serve_forever()


if __name__ == "__main__":
    main()
