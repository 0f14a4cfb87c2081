// A coding round with the official client on /mcp/coding, without any optional argument.
//
// Arguments: the server as JSON, either its url and a token or a command with args and env, and the connection mode
// ("auto" or "legacy"). Prints a report as JSON.

import assert from "node:assert/strict";
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { StdioClientTransport } from "@modelcontextprotocol/client/stdio";

const [server, mode] = process.argv.slice(2);
const PROGRAM = "def double(x):\n    return x + x + 1\n";
const PATCH = `*** Begin Patch
*** Update File: check.sh
@@
 grep -q 'x + x$' double.py
+echo passed
*** End Patch
`;

const seen = { progress: [] };
const client = new Client({ name: "test", version: "1" }, { versionNegotiation: { mode } });
await client.connect(transport(JSON.parse(server)));
seen.version = client.getNegotiatedProtocolVersion();
seen.tools = (await client.listTools()).tools.map((tool) => tool.name);

function transport({ url, token, ...command }) {
  if (!url) return new StdioClientTransport(command);
  const headers = { Authorization: `Bearer ${token}` };
  return new StreamableHTTPClientTransport(new URL(url), { requestInit: { headers } });
}

async function call(name, args = {}) {
  const onprogress = ({ message }) => seen.progress.push(message);
  const result = await client.callTool({ name, arguments: args }, { onprogress, timeout: 60_000 });
  const { text } = result.content[0];
  assert.ok(Buffer.byteLength(text) <= 8192, `${name}: ${text.length}`);
  assert.ok(!result.isError, `${name}: ${text}`);
  return text;
}

await call("sandbox_workspace_write_file", { path: "double.py", content: PROGRAM });
await call("sandbox_workspace_write_file", { path: "check.sh", content: "grep -q 'x + x$' double.py\n" });
seen.before = await call("sandbox_session_exec", { command: "sh check.sh" });
seen.search = await call("sandbox_workspace_search", { pattern: "x \\+ 1" });
await call("sandbox_workspace_edit_file", { path: "double.py", old: " + 1", new: "" });
await call("sandbox_workspace_apply_patch", { diff: PATCH });
seen.after = await call("sandbox_session_exec", { command: "sh check.sh" });
seen.read = await call("sandbox_workspace_read_file", { path: "double.py" });
seen.list = await call("sandbox_workspace_list");
// Long enough for a progress notification.
await call("sandbox_session_exec", { command: "printf 'working \\033[1mhard\\033[0m\\n'; sleep 3" });
await call("sandbox_session_create");
await call("help_get");
await call("sandbox_session_end");
await client.close();
console.log(JSON.stringify(seen));
