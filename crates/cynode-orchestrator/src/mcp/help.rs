//! Help topics for agents.

pub(crate) struct HelpTopic {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) text: &'static str,
}

pub(crate) const TOPICS: &[HelpTopic] = &[
    HelpTopic {
        name: "start",
        about: "From a task to a finished command",
        text: "Every tool names a task_id that your token has access to: db.task.list shows them.\n\
               1. sandbox.session.create {task_id, session_id: \"new\", image_ref: \"default\", \
               workspace_ref: \"new\", constraints: {}} returns a session_id.\n\
               2. sandbox.session.exec {task_id, session_id, argv: [\"sh\", \"-c\", \"…\"], \
               timeout_ms: 60000, cwd: \".\", env: {}} runs a command and waits.\n\
               3. sandbox.workspace.write_file, read_file, apply_patch, list and search work on \
               /workspace.\n\
               4. sandbox.workspace.export_patch stores your changes as an artifact; \
               sandbox.session.end ends the session.",
    },
    HelpTopic {
        name: "commands",
        about: "Long commands, background, output, signals",
        text: "argv is executed without a shell unless you name one. After timeout_ms a command \
               and everything that it started is killed.\n\
               With background: true the call returns an exec_id immediately. \
               sandbox.session.output returns the output following after_seq and waits up to \
               wait_ms for it; the result contains 'exit' once the command has ended.\n\
               The middle of long output is omitted; tail_bytes reads the end. \
               sandbox.session.signal stops one command (exec_id) or everything.",
    },
    HelpTopic {
        name: "files",
        about: "Reading, changing and keeping files",
        text: "Paths are below /workspace. read_file returns sha256; pass it to write_file as \
               if_match to avoid overwriting the changes of others.\n\
               apply_patch applies a unified diff completely or not at all. Artifacts \
               (artifact.put, get, list) outlive sandboxes.",
    },
    HelpTopic {
        name: "errors",
        about: "How to read a refusal",
        text: "A failure has isError: true and structuredContent {code, stage, message, remedy, \
               request_id}. The code is stable; the remedy says what to do.\n\
               stage names the check that refused the call, such as arguments, task, policy, \
               secrets or limits; 'run' means that the call was carried out and failed.\n\
               A call with any stage other than 'run' had no effect.",
    },
    HelpTopic {
        name: "network",
        about: "What a sandbox can reach",
        text: "A sandbox has no network access: only its own loopback. It contains no secrets.",
    },
];
