//! Help topics for agents. Tools have dotted names here; clients read them as they spell them.

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
               3. sandbox.workspace.write_file, sandbox.workspace.read_file, \
               sandbox.workspace.edit_file, sandbox.workspace.apply_patch, sandbox.workspace.list \
               and sandbox.workspace.search work on /workspace.\n\
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
        text: "Paths are below /workspace. sandbox.workspace.read_file returns sha256; pass it to \
               sandbox.workspace.write_file as if_match to avoid overwriting the changes of \
               others.\n\
               sandbox.workspace.edit_file replaces a text that occurs exactly once, or everywhere \
               with all: true.\n\
               sandbox.workspace.apply_patch applies a unified diff, or a patch that begins with \
               '*** Begin Patch', completely or not at all. A hunk without line numbers must fit \
               exactly one place. Wrong hunk headers are repaired, and the answer says so.\n\
               Artifacts (artifact.put, artifact.get, artifact.list) outlive sandboxes.",
    },
    HelpTopic {
        name: "git",
        about: "From a repository to a pull request",
        text: "Start from a repository of the task's project with workspace_ref: \
               \"git:<repository>@<ref>\". Inside, git status, diff, add and commit work; clone, \
               fetch and push do not: no credential is in a sandbox.\n\
               sandbox.workspace.export_patch stores your changes against that commit as an \
               artifact: the changeset. git.repo.validate {task_id, repository, changeset} shows \
               what the rules say about it; git.promote {task_id, repository, changeset, title, \
               message, body} builds the commit, runs the repository's checks, pushes the branch \
               cynode/<task>/… and opens the pull request. Repeat it to wait on: nothing happens \
               twice.\n\
               git.changeset.apply, git.commit.create, git.push and git.pr.create do the same up to \
               their stage. In the answer, state awaiting_approval means that a person must decide; \
               error has the code, and in conflict the hunks or rules that refuse, and the newer base. \
               Then start a session from that, apply your changes there, and export again.",
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

pub(crate) const CODING_TOPICS: &[HelpTopic] = &[
    HelpTopic {
        name: "start",
        about: "Your session and its workspace",
        text: "You have a session of your own: a Linux container with a workspace at /workspace. \
               The first call makes it; every tool uses it unless you pass another session_id.\n\
               1. sandbox.session.exec {command: \"…\"} runs a shell line and waits.\n\
               2. sandbox.workspace.read_file, sandbox.workspace.write_file, \
               sandbox.workspace.edit_file, sandbox.workspace.apply_patch, sandbox.workspace.list \
               and sandbox.workspace.search work on /workspace.\n\
               3. sandbox.workspace.export_patch stores your changes for a person.\n\
               A session that was idle for long or lost is resumed with its files. If its \
               workspace is gone, calls fail with session_ended; sandbox.session.create then \
               starts the next one, empty.",
    },
    HelpTopic {
        name: "commands",
        about: "Long commands, background, output",
        text: "command is run by bash -c, or sh -c in images without bash; argv runs without a \
               shell. The working directory is /workspace, and a command does not see the \
               directory or variables of an earlier one.\n\
               After timeout_ms (120000 by default, at most 10800000) a command and everything \
               that it started is killed.\n\
               With background: true the call returns an exec_id immediately; timeout_ms: 0 then \
               means no timeout. sandbox.session.output reads its output and waits up to wait_ms.\n\
               The middle of long output is left out; the answer names the call that reads it.",
    },
    HelpTopic {
        name: "files",
        about: "Reading and changing files",
        text: "Paths are below /workspace; commands reach other places.\n\
               sandbox.workspace.edit_file replaces a text that occurs exactly once, or everywhere \
               with all: true.\n\
               sandbox.workspace.apply_patch applies a unified diff, or a patch that begins with \
               '*** Begin Patch', completely or not at all; on failure the error shows what each \
               hunk expected and what the file has. A hunk without line numbers must fit exactly \
               one place.\n\
               sandbox.workspace.read_file returns sha256; pass it to sandbox.workspace.write_file \
               or sandbox.workspace.edit_file as if_match to avoid overwriting other changes.",
    },
    HelpTopic {
        name: "errors",
        about: "How to read a refusal",
        text: "The code is stable and the remedy says what to do. A failure whose stage is not \
               'run' had no effect.",
    },
    HelpTopic {
        name: "network",
        about: "What a sandbox can reach",
        text: "A sandbox has no network access: only its own loopback. It contains no secrets.",
    },
];
