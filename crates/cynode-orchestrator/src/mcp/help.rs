//! What agents can read about the tools.

pub(crate) struct Topic {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) text: &'static str,
}

pub(crate) const TOPICS: &[Topic] = &[
    Topic {
        name: "start",
        about: "From a task to a command that ran",
        text: "Every tool names a task_id, and your token must be good for it: db.task.list shows the tasks that it is good for.\n\
               1. sandbox.session.create {task_id, session_id: \"new\", image_ref: \"default\", workspace_ref: \"new\", constraints: {}} gives a session_id.\n\
               2. sandbox.session.exec {task_id, session_id, argv: [\"sh\", \"-c\", \"…\"], timeout_ms: 60000, cwd: \".\", env: {}} runs a command and waits.\n\
               3. sandbox.workspace.write_file, read_file, apply_patch, list, search work on /workspace.\n\
               4. sandbox.workspace.export_patch keeps what changed as an artifact; sandbox.session.end ends the session.",
    },
    Topic {
        name: "commands",
        about: "Long commands, background, output, signals",
        text: "argv is run as it is; there is no shell unless you name one. A command may take up to timeout_ms; then it and all that it started is ended.\n\
               With background: true the answer is an exec_id at once. sandbox.session.output reads what came after after_seq, waits with wait_ms, and has 'exit' when the command has ended.\n\
               Of long output the middle is left out; tail_bytes reads the end. sandbox.session.signal stops one command (exec_id) or everything.",
    },
    Topic {
        name: "files",
        about: "Reading, changing and keeping files",
        text: "Paths are below /workspace. read_file gives sha256; pass it to write_file as if_match, and a change by somebody else is not overwritten.\n\
               apply_patch takes a unified diff and applies all of it or nothing. Artifacts (artifact.put, get, list) stay when sandboxes end.",
    },
    Topic {
        name: "errors",
        about: "How to read a refusal",
        text: "A failure has isError: true and structuredContent {code, stage, message, remedy, request_id}. The code is stable; the remedy says what to do.\n\
               stage says where it was refused: arguments, task, policy, secrets, enabled; or 'run' when it was carried out and failed.\n\
               Nothing was done when the stage is not 'run'.",
    },
    Topic {
        name: "network",
        about: "What a sandbox reaches",
        text: "A sandbox has no network of its own, and no secret is in it. What it may reach goes by proxies that policy controls.",
    },
];
