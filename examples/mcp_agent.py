#!/usr/bin/env python3
"""An agent that uses CyNode through the Model Context Protocol, with the official SDK.

CYNODE_TOKEN is a project manager's token, CYNODE_TASK the task it is limited to. CYNODE_URL
defaults to this machine.
"""

import asyncio
import os

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

URL = os.environ.get("CYNODE_URL", "http://127.0.0.1:12080") + "/mcp"
TASK = os.environ["CYNODE_TASK"]
HEADERS = {"Authorization": f"Bearer {os.environ['CYNODE_TOKEN']}"}


async def main():
    http = httpx2.AsyncClient(headers=HEADERS, timeout=60, trust_env=False)
    async with http, Client(streamable_http_client(URL, http_client=http)) as client:

        async def call(tool, /, **arguments):
            result = await client.call_tool(tool, {"task_id": TASK, **arguments})
            if result.is_error:
                raise SystemExit(f"{tool}: {result.structured_content}")
            return result.structured_content

        session = await call(
            "sandbox.session.create",
            session_id="new", image_ref="default", workspace_ref="new", constraints={},
        )
        here = {"session_id": session["session_id"]}
        await call(
            "sandbox.workspace.write_file", path="sum.py", content="print(sum(range(10)))\n", **here
        )
        ran = await call(
            "sandbox.session.exec",
            argv=["python3", "sum.py"], cwd=".", env={}, timeout_ms=30000, **here,
        )
        print("sum.py printed", ran["stdout"].strip())
        await call("artifact.put", path="result.txt", content=ran["stdout"])
        kept = await call("artifact.list")
        print("artifacts:", *(item["path"] for item in kept["items"]))
        await call("sandbox.session.end", reason="done", **here)


asyncio.run(main())
