"""A coding round with the official client on /mcp/coding, without any optional argument.

Arguments: the server as JSON, either its url and a token or a command with args and env, and the connection
mode ("auto" or "legacy"). Prints a report as JSON.
"""

import asyncio
import contextlib
import json
import sys

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

PROGRAM = "def double(x):\n    return x + x + 1\n"
PATCH = "--- a/check.sh\n+++ b/check.sh\n@@ -1 +1,2 @@\n grep -q 'x + x$' double.py\n+echo passed\n"


@contextlib.asynccontextmanager
async def transport(server):
    if "command" in server:
        yield StdioServerParameters(**server)
        return
    headers = {"Authorization": f"Bearer {server['token']}"}
    async with httpx2.AsyncClient(headers=headers, timeout=60, trust_env=False) as http:
        yield streamable_http_client(server["url"], http_client=http)


async def main(server, mode):
    seen = {"progress": []}
    async with transport(json.loads(server)) as way, Client(way, mode=mode, read_timeout_seconds=60) as client:
        seen["version"] = client.protocol_version
        seen["tools"] = [tool.name for tool in (await client.list_tools()).tools]

        async def progress(done, total, message):
            seen["progress"].append(message)

        async def call(name, /, **arguments):
            result = await client.call_tool(name, arguments, progress_callback=progress)
            text = result.content[0].text
            assert len(text.encode()) <= 8192, (name, len(text))
            assert not result.is_error, (name, text)
            return text

        await call("sandbox_workspace_write_file", path="double.py", content=PROGRAM)
        await call("sandbox_workspace_write_file", path="check.sh", content="grep -q 'x + x$' double.py\n")
        seen["before"] = await call("sandbox_session_exec", command="sh check.sh")
        seen["search"] = await call("sandbox_workspace_search", pattern="x \\+ 1")
        await call("sandbox_workspace_edit_file", path="double.py", old=" + 1", new="")
        await call("sandbox_workspace_apply_patch", diff=PATCH)
        seen["after"] = await call("sandbox_session_exec", command="sh check.sh")
        seen["read"] = await call("sandbox_workspace_read_file", path="double.py")
        seen["list"] = await call("sandbox_workspace_list")
        # Long enough for a progress notification.
        await call("sandbox_session_exec", command="printf 'working \\033[1mhard\\033[0m\\n'; sleep 3")
        await call("sandbox_session_create")
        await call("help_get")
        await call("sandbox_session_end")
    print(json.dumps(seen))


asyncio.run(main(*sys.argv[1:]))
