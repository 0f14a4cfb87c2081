"""An agent on the official client, which checks every result against the tool's schema.

Arguments: the address, the token, a task and the connection mode ("auto" or "legacy"). Prints a
report as JSON.
"""

import asyncio
import json
import sys

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client


async def main(url, token, task, mode):
    seen = {"progress": 0}
    http = httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=60, trust_env=False)
    async with http, Client(streamable_http_client(url, http_client=http), mode=mode, read_timeout_seconds=60) as client:
        seen["version"] = client.protocol_version
        seen["server"] = client.server_info.name if client.server_info else None
        seen["tools"] = [tool.name for tool in (await client.list_tools()).tools]

        async def call(name, /, **arguments):
            result = await client.call_tool(name, arguments, progress_callback=progress)
            text = result.content[0].text
            assert len(text.encode()) <= 8192, (name, len(text))
            return result

        async def progress(done, total, message):
            seen["progress"] += 1

        async def done(name, /, **arguments):
            result = await call(name, **arguments)
            assert not result.is_error, (name, result.structured_content)
            return result.structured_content

        session = await done(
            "sandbox.session.create", task_id=task, session_id="new", image_ref="default", workspace_ref="new",
            constraints={"limits": {"memory_bytes": 64 << 20, "disk_bytes": 32 << 20}},
        )
        here = {"task_id": task, "session_id": session["session_id"]}
        run = {**here, "timeout_ms": 30000, "cwd": ".", "env": {}}
        seen["exec"] = await done("sandbox.session.exec", argv=["sh", "-c", "echo $((6 * 7))"], **run)
        # Long enough for a progress notification.
        await done("sandbox.session.exec", argv=["sleep", "3"], **run)
        begun = await done("sandbox.session.exec", argv=["echo", "later"], background=True, **run)
        seen["output"] = await done("sandbox.session.output", exec_id=begun["exec_id"], wait_ms=20000, **here)
        await done("sandbox.workspace.write_file", path="a.txt", content="zero\n", **here)
        await done("sandbox.workspace.edit_file", path="a.txt", old="zero", new="none", **here)
        diff = "--- a/a.txt\n+++ b/a.txt\n@@ -1,9 +1,9 @@\n-none\n+one\n"
        seen["patch"] = await done("sandbox.workspace.apply_patch", diff=diff, **here)
        seen["read"] = await done("sandbox.workspace.read_file", path="a.txt", **here)
        await done("sandbox.workspace.list", **here)
        await done("sandbox.workspace.search", pattern="one", **here)
        await done("sandbox.session.get", **here)
        await done("sandbox.session.list", task_id=task)
        await done("artifact.put", task_id=task, path="kept", content="kept")
        await done("artifact.get", task_id=task, path="kept")
        await done("artifact.list", task_id=task)
        await done("events.list", task_id=task)
        job = await done("db.job.create", task_id=task, command=["true"])
        await done("db.job.get", task_id=task, job_id=job["job_id"])
        await done("db.job.list", task_id=task)
        await done("db.task.get", task_id=task)
        await done("db.task.list")
        await done("db.task.update", task_id=task, status="active")
        await done("db.preference.set", task_id=task, key="color", value={"any": ["thing", 1, None]})
        await done("db.preference.get", task_id=task, key="color")
        await done("db.preference.list", task_id=task)
        await done("db.preference.effective", task_id=task)
        await done("db.system_setting.list")
        await done("db.system_setting.get", key="sandbox.default_image")
        nodes = await done("node.list")
        await done("node.get", node_id=nodes["items"][0]["id"])
        await done("db.project.list", task_id=task)
        await done("sandbox.allowed_images.list")
        await done("help.list")
        await done("help.get", topic="start")
        missing = await call("sandbox.workspace.read_file", path="none", **here)
        seen["failure"] = missing.structured_content if missing.is_error else None
        try:
            await client.call_tool("no.such.tool", {})
        except Exception as error:
            seen["unknown"] = str(error)
        await done("sandbox.session.signal", signal="TERM", **here)
        await done("sandbox.session.end", reason="done", **here)
    print(json.dumps(seen))


asyncio.run(main(*sys.argv[1:]))
