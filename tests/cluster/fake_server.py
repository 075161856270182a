"""A program in the place of a server's interpreter: it answers every GET with 200, and runs no policy."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


if __name__ == "__main__":
    HTTPServer((option("--host"), int(option("--port"))), Answer).serve_forever()
