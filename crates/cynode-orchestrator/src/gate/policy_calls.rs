//! What policies see of a call: its programs, image, limits and every path that it touches.

use std::borrow::Cow;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use cynode_api::LimitsRequest;
use cynode_policy::{Action, CallContext, CallLimits, within_workspace};
use cynode_service::ApiError;
use serde::Deserialize as _;
use serde_json::{Map, Value, json};

use super::{
    patches::CallerPatch, submitted_jobs::SubmittedJob, submitted_prompts::SubmittedPrompt,
};

/// The number of a call's paths, and of a job's programs, that a record lists.
const RECORDED_NAMES: usize = 100;

/// The limits in a body. The handler refuses malformed ones.
fn limits(body: &Value) -> CallLimits {
    policy_limits(LimitsRequest::deserialize(&body["limits"]).unwrap_or_default())
}

/// Limits in the units that policies compare.
pub(crate) fn policy_limits(requested: LimitsRequest) -> CallLimits {
    let limits = requested.or_default();
    // Rounded up, so that a rule that allows two processors does not allow 2.0001.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the cast saturates, and limits that no node can give are refused later"
    )]
    let millicpus = (limits.cpus * 1_000.0).ceil() as i64;
    CallLimits {
        memory_bytes: i64::try_from(limits.memory_bytes).unwrap_or(i64::MAX),
        millicpus,
        pids: limits.pids.into(),
        disk_bytes: i64::try_from(limits.disk_bytes).unwrap_or(i64::MAX),
        nofile: i64::try_from(limits.nofile).unwrap_or(i64::MAX),
    }
}

/// The call as policies see it: one [`CallContext`] for each path that it touches, and for each program of
/// a job. Each path and each program is in at least one of them; not every path meets every
/// program.
#[derive(Debug, Default)]
pub(crate) struct PolicyCalls<'a> {
    call: CallContext,
    /// The directory of relative paths, stored once because thousands of paths may share it.
    base: Option<String>,
    paths: Vec<Cow<'a, str>>,
    /// Of a job with a specification; other calls have at most one, in `call`.
    programs: Vec<&'a str>,
}

impl<'a> PolicyCalls<'a> {
    pub(crate) fn new(
        action: Action,
        body: &'a Value,
        query: &[(String, String)],
        archive_paths: impl Iterator<Item = &'a str>,
        patch: Option<&CallerPatch<'_>>,
    ) -> Result<Self, ApiError> {
        let job = SubmittedJob::of(action, body);
        let base = (action == Action::FileImport).then(|| queried_path(query));
        let paths = match action {
            // The empty path is the directory itself.
            Action::FileImport => std::iter::once("")
                .chain(archive_paths)
                .map(Cow::Borrowed)
                .collect(),
            // Without a patch, the handler refuses the body.
            Action::FilePatch => {
                let paths = patch.map(CallerPatch::paths).unwrap_or_default();
                paths.into_iter().map(Cow::Owned).collect()
            }
            Action::JobCreate => {
                let paths = job
                    .map(SubmittedJob::paths)
                    .transpose()?
                    .unwrap_or_default();
                paths.into_iter().map(Cow::Owned).collect()
            }
            _ => paths(action, body, query)
                .into_iter()
                .map(Cow::Owned)
                .collect(),
        };
        let call = call(action, body, query);
        // A command beside the specification is one more program of the job.
        let runner = body["command"][0].as_str();
        let programs = job.map(|job| job.programs().into_iter().chain(runner).collect());
        // So are the checks of a prompt, and the handler refuses a prompt beside anything else.
        let of_prompt = SubmittedPrompt::of(action, body).and_then(SubmittedPrompt::program);
        let mut programs: Vec<&str> = programs.unwrap_or_default();
        programs.extend(of_prompt);
        Ok(Self {
            call,
            base,
            paths,
            programs,
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.paths.len().max(self.programs.len()).max(1)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = CallContext> {
        (0..self.len()).map(|number| {
            let path = cyclic(&self.paths, number).map(|path| match &self.base {
                Some(base) => within_workspace(&format!("{base}/{path}")),
                None => within_workspace(path),
            });
            let call = self.call.clone();
            CallContext {
                path,
                program: cyclic(&self.programs, number)
                    .map(|program| (*program).to_owned())
                    .or(call.program),
                ..call
            }
        })
    }

    /// Lists the files that a patch touches and a job writes, and the programs of a job. Other
    /// calls name theirs in the query or body.
    pub(crate) fn describe(&self, action: Action, detail: &mut Map<String, Value>) {
        let mut list = |name: &str, count: &str, total: usize, items: Value| {
            detail.insert(name.to_owned(), items);
            detail.insert(count.to_owned(), json!(total));
        };
        if action == Action::FilePatch || (action == Action::JobCreate && !self.paths.is_empty()) {
            let paths = self.paths.iter().take(RECORDED_NAMES);
            let paths = paths.map(|path| json!(path)).collect();
            list("paths", "path_count", self.paths.len(), paths);
        }
        if !self.programs.is_empty() {
            let programs = self.programs.iter().take(RECORDED_NAMES);
            let programs = programs.map(|program| json!(program)).collect();
            list("programs", "program_count", self.programs.len(), programs);
        }
    }
}

/// An item of a list that is repeated.
fn cyclic<T>(items: &[T], number: usize) -> Option<&T> {
    items.get(number.checked_rem(items.len())?)
}

fn call(action: Action, body: &Value, query: &[(String, String)]) -> CallContext {
    let text = |name: &str| body.get(name).and_then(Value::as_str).map(str::to_owned);
    let mut call = CallContext::default();
    match action {
        Action::SessionExec => call.program = body["argv"][0].as_str().map(str::to_owned),
        Action::JobCreate => {
            call.program = body["command"][0].as_str().map(str::to_owned);
            call.image = text("image_ref");
            call.network = text("network_policy");
            call.limits = Some(limits(body));
        }
        Action::SessionCreate => {
            call.image = text("image_ref");
            call.network = text("network_policy");
            call.limits = Some(limits(body));
            call.pty = body["pty_allowed"].as_bool().unwrap_or(false);
        }
        Action::SessionPty => {
            call.pty = true;
            call.program = query
                .iter()
                .find(|(name, _)| name == "argv")
                .map(|(_, value)| value.clone());
        }
        Action::TokenCreate => call.token_kind = text("kind"),
        _ => {}
    }
    call
}

fn paths(action: Action, body: &Value, query: &[(String, String)]) -> Vec<String> {
    // Paths that are not UTF-8 are passed as base64.
    let named = |name: &str| -> Vec<String> {
        let text = |name: &str| body.get(name).and_then(Value::as_str);
        let bytes = text(&format!("{name}_b64"))
            .and_then(|text| STANDARD.decode(text).ok())
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        text(name)
            .map(str::to_owned)
            .into_iter()
            .chain(bytes)
            .collect()
    };
    match action {
        // An edit names its path in the body, a write in the query.
        Action::FileWrite if body.is_object() => edited_path(body).into_iter().collect(),
        Action::FileRead | Action::FileStat | Action::FileWrite | Action::FileDelete => {
            vec![queried_path(query)]
        }
        // A watch names its path in the query, a listing in the body.
        Action::FileList if !body.is_object() => vec![queried_path(query)],
        Action::FileList | Action::FileSearch | Action::FileMkdir => {
            let named = named("path");
            if named.is_empty() {
                vec![".".to_owned()]
            } else {
                named
            }
        }
        Action::FileMove => [named("from"), named("to")].into_iter().flatten().collect(),
        _ => Vec::new(),
    }
}

/// The path of an edit. The handler refuses a body without one.
pub(super) fn edited_path(body: &Value) -> Option<String> {
    body.get("path").and_then(Value::as_str).map(str::to_owned)
}

pub(super) fn queried_path(query: &[(String, String)]) -> String {
    let value = |wanted: &str| {
        query
            .iter()
            .find(|(name, _)| name == wanted)
            .map(|(_, value)| value.clone())
    };
    let from_bytes = || {
        value("path_b64")
            .and_then(|text| STANDARD.decode(text).ok())
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    };
    value("path")
        .or_else(from_bytes)
        .unwrap_or_else(|| ".".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_see_the_limits_that_a_sandbox_will_have() {
        let seen = |action, limits: Value| {
            call(action, &json!({"limits": limits}), &[])
                .limits
                .map(|seen| {
                    (
                        seen.memory_bytes,
                        seen.millicpus,
                        seen.pids,
                        seen.disk_bytes,
                        seen.nofile,
                    )
                })
        };
        for action in [Action::SessionCreate, Action::JobCreate] {
            assert_eq!(
                seen(action, Value::Null),
                Some((2 << 30, 1_000, 512, 10 << 30, 1_024))
            );
            assert_eq!(
                seen(
                    action,
                    json!({"memory_bytes": 1_u64 << 45, "cpus": 2.0001, "pids": 9, "disk_bytes": 7, "nofile": 5})
                ),
                Some((1 << 45, 2_001, 9, 7, 5))
            );
            assert_eq!(
                seen(
                    action,
                    json!({"memory_bytes": u64::MAX, "cpus": 1e300, "disk_bytes": u64::MAX, "nofile": u64::MAX})
                ),
                Some((i64::MAX, i64::MAX, 512, i64::MAX, i64::MAX))
            );
        }
        assert_eq!(seen(Action::SessionExec, json!({"pids": 9})), None);
    }

    fn patch_paths(diff: &str, strip: Option<u32>) -> Result<Vec<String>, String> {
        let (action, body) = (Action::FilePatch, json!({"diff": diff, "strip": strip}));
        let patch = CallerPatch::read(action, &body).map_err(|error| error.detail.clone())?;
        let calls = PolicyCalls::new(action, &body, &[], std::iter::empty(), patch.as_ref())
            .map_err(|error| error.detail.clone())?;
        Ok(calls.iter().filter_map(|call| call.path).collect())
    }

    fn created(name: &str) -> String {
        format!("--- /dev/null\n+++ {name}\n@@ -0,0 +1 @@\n+x\n")
    }

    #[test]
    fn policies_see_exactly_the_paths_that_a_patch_touches() {
        let diff = "diff --git a/x b/sub/y\nrename from x\nrename to sub/y\n--- a/x\n+++ b/sub/y\n\
             @@ -1 +1 @@\n-a\n+b\n"
            .to_owned()
            + &created("b/new file\t2026");
        assert_eq!(
            patch_paths(&diff, None).expect("read"),
            ["/workspace/new file", "/workspace/sub/y", "/workspace/x"]
        );
        for (name, strip, expected) in [
            ("zz", 1, "/workspace/zz"),
            ("zz", 32, "/workspace/zz"),
            ("b//p/x", 1, "/workspace/p/x"),
            ("b/./p//x", 1, "/workspace/p/x"),
            ("\"b/protect\\145d/x\"", 1, "/workspace/protected/x"),
            ("p/x", 0, "/workspace/p/x"),
            // Absolute names are never stripped; the agent rejects them.
            ("/protected/x", 1, "/protected/x"),
        ] {
            assert_eq!(
                patch_paths(&created(name), Some(strip)).expect("read"),
                [expected],
                "{name} at {strip}"
            );
        }
        assert_eq!(
            patch_paths("diff --git a/p/x b/p/x\nnew file mode 100644\n", None).expect("read"),
            ["/workspace/p/x"]
        );
        // Hunks have no say in the paths, however wrong they are.
        let begin = "*** Begin Patch\n*** Update File: p/./a\n*** Move to: q/b\n@@\n-a\n+b\n\
             *** Add File: /etc/x\n+a\n*** Delete File: p/../c\n*** End Patch\n";
        for strip in [None, Some(0), Some(3)] {
            assert_eq!(
                patch_paths(begin, strip).expect("read"),
                ["/etc/x", "/workspace/c", "/workspace/p/a", "/workspace/q/b"]
            );
        }
        for header in ["@@ -7,9 +8 @@", "@@ @@", "@@"] {
            let diff = format!("--- a/p/x\n+++ b/p/y\n{header}\n-a\n+b\n");
            assert_eq!(
                patch_paths(&diff, None).expect("read"),
                ["/workspace/p/x", "/workspace/p/y"],
                "{header}"
            );
        }
        assert!(
            patch_paths("no diff\n", None)
                .expect_err("refused")
                .contains("the diff can't be parsed")
        );
    }

    #[test]
    fn a_line_of_many_spaces_is_refused_in_linear_memory() {
        let line = format!(
            "diff --git {}\nnew file mode 100644\n",
            "a/b ".repeat(22_000)
        );
        assert!(
            patch_paths(&line, None)
                .expect_err("refused")
                .contains("line 1")
        );
    }

    #[test]
    fn policies_see_the_path_that_a_call_acts_on_and_no_stray_one() {
        let query = [("path".to_owned(), "in/query".to_owned())];
        let seen = |action, body: &Value| -> Vec<String> {
            let calls = PolicyCalls::new(action, body, &query, std::iter::empty(), None)
                .expect("few paths");
            calls.iter().filter_map(|call| call.path).collect()
        };
        let body = json!({"path": "in/body"});
        for (action, body, expected) in [
            (Action::FileWrite, &Value::Null, "/workspace/in/query"),
            (Action::FileWrite, &body, "/workspace/in/body"),
            (Action::FileList, &Value::Null, "/workspace/in/query"),
            (Action::FileList, &body, "/workspace/in/body"),
            (Action::FileList, &json!({}), "/workspace"),
        ] {
            assert_eq!(seen(action, body), [expected], "{action:?} {body}");
        }
        assert_eq!(seen(Action::FileWrite, &json!({"old": "x"})), [""; 0]);
    }

    #[test]
    fn policies_see_each_path_of_an_import_below_its_base() {
        let query = [("path".to_owned(), "sub/".to_owned())];
        let calls = PolicyCalls::new(
            Action::FileImport,
            &Value::Null,
            &query,
            ["a", "./b//c"].into_iter(),
            None,
        )
        .expect("few paths");
        assert_eq!(calls.len(), 3);
        assert_eq!(
            calls
                .iter()
                .filter_map(|call| call.path)
                .collect::<Vec<_>>(),
            ["/workspace/sub", "/workspace/sub/a", "/workspace/sub/b/c"]
        );
        let body = json!({"argv": ["ls"]});
        let none = PolicyCalls::new(Action::SessionExec, &body, &[], std::iter::empty(), None)
            .expect("few paths");
        assert_eq!(
            (
                none.len(),
                none.iter().map(|call| call.program).collect::<Vec<_>>()
            ),
            (1, vec![Some("ls".to_owned())])
        );
    }
    #[test]
    fn policies_see_each_program_and_each_written_path_of_a_job() {
        let run = |argv: &[&str]| json!({"type": "run_command", "args": {"argv": argv}});
        let write = |path: &str| json!({"type": "write_file", "args": {"path": path}});
        let seen = |body: &Value| -> Vec<(Option<String>, Option<String>)> {
            let action = Action::JobCreate;
            let calls =
                PolicyCalls::new(action, body, &[], std::iter::empty(), None).expect("few paths");
            assert_eq!(calls.iter().count(), calls.len());
            calls.iter().map(|call| (call.program, call.path)).collect()
        };
        let some = |text: &str| Some(text.to_owned());
        let steps = [
            run(&["rm"]),
            run(&["git"]),
            run(&["make"]),
            write("../a"),
            write("b"),
        ];
        assert_eq!(
            seen(&json!({"job": {"steps": steps}})),
            [
                (some("git"), some("/a")),
                (some("make"), some("/workspace/b")),
                (some("rm"), some("/a")),
            ]
        );
        assert_eq!(
            seen(&json!({"command": ["./runner"], "job": {"steps": [run(&["rm"])]}})),
            [(some("rm"), None), (some("./runner"), None)]
        );
        assert_eq!(
            seen(&json!({"job": {"steps": [write("a"), write("b")]}})),
            [(None, some("/workspace/a")), (None, some("/workspace/b"))]
        );
        assert_eq!(seen(&json!({"job": {"steps": []}})), [(None, None)]);
        assert_eq!(seen(&json!({"command": ["ls"]})), [(some("ls"), None)]);
    }
}
