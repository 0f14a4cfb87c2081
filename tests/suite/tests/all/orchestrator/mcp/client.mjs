// An agent on the official client, which checks every result against the tool's schema.
//
// Arguments: the address, the token, a task and the connection mode ("auto" or "legacy"). Prints a report as JSON.

import assert from "node:assert/strict";
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";

const [url, token, task_id, mode] = process.argv.slice(2);
const seen = { progress: 0 };
const client = new Client({ name: "test", version: "1" }, { versionNegotiation: { mode } });
const headers = { Authorization: `Bearer ${token}` };
await client.connect(new StreamableHTTPClientTransport(new URL(url), { requestInit: { headers } }));
seen.version = client.getNegotiatedProtocolVersion();
seen.server = client.getServerVersion()?.name ?? null;
seen.tools = (await client.listTools()).tools.map((tool) => tool.name);

async function call(name, args) {
  const onprogress = () => (seen.progress += 1);
  const result = await client.callTool({ name, arguments: args }, { onprogress, timeout: 60_000 });
  const { text } = result.content[0];
  assert.ok(Buffer.byteLength(text) <= 8192, `${name}: ${text.length}`);
  return result;
}

async function done(name, args) {
  const result = await call(name, args);
  assert.ok(!result.isError, `${name}: ${JSON.stringify(result.structuredContent)}`);
  return result.structuredContent;
}

const session = await done("sandbox.session.create", {
  task_id,
  session_id: "new",
  image_ref: "default",
  workspace_ref: "new",
  constraints: { limits: { memory_bytes: 64 * 2 ** 20, disk_bytes: 32 * 2 ** 20 } },
});
const here = { task_id, session_id: session.session_id };
const run = { ...here, timeout_ms: 30_000, cwd: ".", env: {} };
seen.exec = await done("sandbox.session.exec", { argv: ["sh", "-c", "echo $((6 * 7))"], ...run });
// Long enough for a progress notification.
await done("sandbox.session.exec", { argv: ["sleep", "3"], ...run });
const begun = await done("sandbox.session.exec", { argv: ["echo", "later"], background: true, ...run });
seen.output = await done("sandbox.session.output", { exec_id: begun.exec_id, wait_ms: 20_000, ...here });
await done("sandbox.workspace.write_file", { path: "a.txt", content: "zero\n", ...here });
await done("sandbox.workspace.edit_file", { path: "a.txt", old: "zero", new: "none", ...here });
const diff = "--- a/a.txt\n+++ b/a.txt\n@@ -1,9 +1,9 @@\n-none\n+one\n";
seen.patch = await done("sandbox.workspace.apply_patch", { diff, ...here });
seen.read = await done("sandbox.workspace.read_file", { path: "a.txt", ...here });
await done("sandbox.workspace.list", here);
await done("sandbox.workspace.search", { pattern: "one", ...here });
await done("sandbox.session.get", here);
await done("sandbox.session.list", { task_id });
await done("artifact.put", { task_id, path: "kept", content: "kept" });
await done("artifact.get", { task_id, path: "kept" });
await done("artifact.list", { task_id });
await done("events.list", { task_id });
const job = await done("db.job.create", { task_id, command: ["true"] });
await done("db.job.get", { task_id, job_id: job.job_id });
await done("db.job.list", { task_id });
await done("db.task.get", { task_id });
await done("db.task.list", {});
await done("db.task.update", { task_id, status: "active" });
await done("db.preference.set", { task_id, key: "color", value: { any: ["thing", 1, null] } });
await done("db.preference.get", { task_id, key: "color" });
await done("db.preference.list", { task_id });
await done("db.preference.effective", { task_id });
await done("db.system_setting.list", {});
await done("db.system_setting.get", { key: "sandbox.default_image" });
const nodes = await done("node.list", {});
await done("node.get", { node_id: nodes.items[0].id });
await done("db.project.list", { task_id });
await done("sandbox.allowed_images.list", {});
await done("help.list", {});
await done("help.get", { topic: "start" });
const missing = await call("sandbox.workspace.read_file", { path: "none", ...here });
seen.failure = missing.isError ? missing.structuredContent : null;
try {
  await client.callTool({ name: "no.such.tool", arguments: {} });
} catch (error) {
  seen.unknown = String(error);
}
await done("sandbox.session.signal", { signal: "TERM", ...here });
await done("sandbox.session.end", { reason: "done", ...here });
await client.close();
console.log(JSON.stringify(seen));
