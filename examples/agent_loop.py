#!/usr/bin/env python3
"""The loop of a coding agent, over HTTP and with the standard library only.

It runs the tests, reads the failure, patches the source and runs the tests again. A real agent
asks a model for the patch. CYNODE_TOKEN is a user's token; CYNODE_URL defaults to this machine.
"""

import json
import os
import time
import urllib.error
import urllib.request

URL = os.environ.get("CYNODE_URL", "http://127.0.0.1:12080")
TOKEN = os.environ["CYNODE_TOKEN"]
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

SOURCE = """def double(n):
    return n + 2
"""
TEST = """import unittest
from numbers_ import double

class Doubles(unittest.TestCase):
    def test_double(self):
        self.assertEqual(double(5), 10)

unittest.main()
"""
PATCH = """--- a/numbers_.py
+++ b/numbers_.py
@@ -1,2 +1,2 @@
 def double(n):
-    return n + 2
+    return n * 2
"""


def call(method, path, body=None, content_type="application/json"):
    """Calls the API and returns its JSON. An error response is a problem document with a remedy."""
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data=data, method=method)
    request.add_header("Authorization", f"Bearer {TOKEN}")
    request.add_header("Content-Type", content_type)
    try:
        with OPENER.open(request, timeout=90) as response:
            return json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        problem = json.loads(error.read())
        raise SystemExit(f"{problem['code']}: {problem['detail']} {problem['remedy']}") from None


class Session:
    """A sandbox that lasts as long as the `with` block."""

    def __enter__(self):
        self.object = call("POST", "/v1/sessions", {})
        self.path = f"/v1/sessions/{self.object['session_id']}"
        while self.object["state"] == "creating":
            time.sleep(0.1)
            self.object = call("GET", self.path)
        return self

    def __exit__(self, *_):
        call("POST", self.path + "/end", {})

    def write(self, name, text):
        call("PUT", f"{self.path}/files?path={name}", text.encode(), "application/octet-stream")

    def patch(self, diff):
        return call("POST", self.path + "/files:patch", {"diff": diff})

    def run(self, *argv, timeout_ms=30_000):
        return call("POST", self.path + "/exec", {"argv": argv, "timeout_ms": timeout_ms})


with Session() as session:
    session.write("numbers_.py", SOURCE)
    session.write("test_numbers.py", TEST)
    for attempt in range(1, 3):
        result = session.run("python3", "-B", "test_numbers.py")
        failure = [line for line in result["stderr"].splitlines() if "Error" in line]
        print(f"attempt {attempt}: exit code {result['exit_code']}", *failure[-1:])
        if result["exit_code"] == 0:
            break
        session.patch(PATCH)
