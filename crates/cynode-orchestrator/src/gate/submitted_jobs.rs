//! The specification in the body of a new job, as policies, the scan for secrets and the record see
//! it.
//!
//! It is read as it came: the handler refuses one that is not valid, after the gate has judged it.
//!
//! Invariant: every command of a valid specification has its program judged and every file that a
//! step writes its path, and every text is scanned, whichever step or criterion holds it.

use std::collections::{BTreeMap, BTreeSet};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use cynode_api::{ErrorCode, Flags, ProjectId, file_limits};
use cynode_patch::Patch;
use cynode_policy::{Action, Channel, Scanner, ShapePolicy};
use cynode_service::ApiError;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use super::{
    admit::MAX_PATHS,
    leaks::{self, Leak},
    patches::scan_patch,
    refusal::count_secret,
};
use crate::Orchestrator;

/// The program of a command in a shell.
pub(super) const SHELL: &str = "sh";
/// The contents of binary patches in one job, together and inflated.
const MAX_INFLATED_BYTES: usize = 128 * 1024 * 1024;

/// A specification, not validated yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SubmittedJob<'a>(&'a Map<String, Value>);

impl<'a> SubmittedJob<'a> {
    /// The specification in the body of a call. Other calls have none.
    pub(crate) fn of(action: Action, body: &'a Value) -> Option<Self> {
        let job = (action == Action::JobCreate).then(|| body.get("job"))??;
        job.as_object().map(Self)
    }

    /// An id that the specification names.
    pub(crate) fn id(self, name: &str) -> Option<&'a str> {
        self.0.get(name)?.as_str()
    }

    fn list(value: Option<&'a Value>) -> impl Iterator<Item = (usize, &'a Map<String, Value>)> {
        let items = value.and_then(Value::as_array).into_iter().flatten();
        items
            .enumerate()
            .filter_map(|(index, item)| Some((index, item.as_object()?)))
    }

    fn steps(self) -> impl Iterator<Item = Step<'a>> {
        Self::list(self.0.get("steps")).map(|(index, members)| Step { index, members })
    }

    fn criteria(self) -> impl Iterator<Item = (usize, &'a Map<String, Value>)> {
        let context = self.0.get("context");
        Self::list(context.and_then(|context| context.get("acceptance_criteria")))
    }

    /// The distinct programs that steps and the checks of criteria name.
    pub(crate) fn programs(self) -> BTreeSet<&'a str> {
        let steps = self
            .steps()
            .filter(|step| step.kind() == "run_command")
            .filter_map(Step::args);
        let checks = self
            .criteria()
            .filter_map(|(_, criterion)| criterion.get("check"));
        steps.chain(checks).filter_map(program).collect()
    }

    /// The distinct paths that steps write. The handler refuses diffs that can't be read.
    pub(crate) fn paths(self) -> Result<BTreeSet<String>, ApiError> {
        let mut paths = BTreeSet::new();
        let mut inflated = 0_usize;
        for step in self.steps() {
            if let Some(path) = step.text("write_file", "path") {
                paths.insert(path.to_owned());
            }
            let diff = step.text("apply_unified_diff", "diff");
            for patch in diff.into_iter().flat_map(readings) {
                inflated = inflated.saturating_add(patch.inflated_bytes());
                let touched = patch.paths().into_iter();
                paths.extend(touched.map(|path| String::from_utf8_lossy(path).into_owned()));
            }
            if inflated > MAX_INFLATED_BYTES {
                return Err(ApiError::new(
                    ErrorCode::TooLarge,
                    format!(
                        "job.steps: the diffs have binary contents of more than \
                         {MAX_INFLATED_BYTES} bytes together; split the job"
                    ),
                ));
            }
            // One more than is allowed is enough to refuse them.
            if paths.len() > MAX_PATHS {
                break;
            }
        }
        Ok(paths)
    }

    /// What a record says of the specification: its hash and what it consists of, but no text.
    pub(crate) fn describe(self) -> Value {
        let mut types: BTreeMap<&str, u64> = BTreeMap::new();
        let mut count = 0_u64;
        for step in self.steps() {
            count += 1;
            let known = KINDS.iter().find(|kind| **kind == step.kind());
            *types.entry(known.unwrap_or(&"other")).or_default() += 1;
        }
        let mut hash = HashWriter::default();
        // Hashing can't fail.
        let _hashed = serde_json::to_writer(&mut hash, self.0);
        json!({
            "kind": if count == 0 { "agent" } else { "steps" },
            "steps": count,
            "types": types,
            "sha256": hex::encode(hash.hash.finalize()),
            "size": hash.size,
        })
    }

    /// Scans the specification for shapes: commands and variables as those of a call, written files
    /// and diffs by the files they are for, all other text as names.
    pub(crate) fn scan(
        self,
        scanner: &Scanner,
        policy: ShapePolicy,
        flags: &mut Flags,
    ) -> Result<(), Leak> {
        let scan = Scan { scanner, policy };
        for (name, value) in self.0 {
            match name.as_str() {
                "steps" | "context" => {}
                _ => scan.name(&format!("job.{name}"), value, flags)?,
            }
        }
        let is_list = |value: Option<&Value>| value.is_none_or(Value::is_array);
        if !is_list(self.0.get("steps")) {
            scan.name("job.steps", &self.0["steps"], flags)?;
        }
        for step in self.steps() {
            step.scan(scan, flags)?;
        }
        self.scan_context(scan, flags)
    }

    fn scan_context(self, scan: Scan<'_>, flags: &mut Flags) -> Result<(), Leak> {
        let Some(context) = self.0.get("context").and_then(Value::as_object) else {
            let context = self.0.get("context").unwrap_or(&Value::Null);
            return scan.name("job.context", context, flags);
        };
        for (name, value) in context {
            if name != "acceptance_criteria" || !value.is_array() {
                scan.name(&format!("job.context.{name}"), value, flags)?;
            }
        }
        let criteria = context.get("acceptance_criteria").and_then(Value::as_array);
        for (index, criterion) in criteria.into_iter().flatten().enumerate() {
            let place = format!("job.context.acceptance_criteria[{index}]");
            let Some(members) = criterion.as_object() else {
                scan.name(&place, criterion, flags)?;
                continue;
            };
            for (name, value) in members {
                let place = format!("{place}.{name}");
                match value.as_object().filter(|_| name == "check") {
                    Some(check) => scan.command(&place, check, flags)?,
                    None => scan.name(&place, value, flags)?,
                }
            }
        }
        Ok(())
    }
}

/// The types of steps.
const KINDS: [&str; 5] = [
    "run_command",
    "write_file",
    "read_file",
    "apply_unified_diff",
    "list_tree",
];

/// The program of a command: its first word, or the shell's name.
fn program(args: &Value) -> Option<&str> {
    if args["shell"] == true {
        return Some(SHELL);
    }
    args["argv"][0].as_str()
}

/// Every way in which a runner may read a diff: strictly, or repaired.
fn readings(diff: &str) -> impl Iterator<Item = Patch<'_>> {
    let strip = file_limits::DEFAULT_STRIP;
    let strict = Patch::parse(diff.as_bytes(), strip).ok();
    let repaired = Patch::parse_any(diff.as_bytes(), strip)
        .ok()
        .map(|(patch, _)| patch);
    let is_same = strict == repaired;
    strict.into_iter().chain(repaired.filter(|_| !is_same))
}

/// Fails for the diff of a step that nobody can read.
pub(crate) fn check_step_diff(diff: &str) -> Result<(), String> {
    if readings(diff).next().is_some() {
        return Ok(());
    }
    match Patch::parse_any(diff.as_bytes(), file_limits::DEFAULT_STRIP) {
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

#[derive(Clone, Copy, Debug)]
struct Step<'a> {
    index: usize,
    members: &'a Map<String, Value>,
}

impl<'a> Step<'a> {
    fn kind(&self) -> &'a str {
        self.members
            .get("type")
            .and_then(Value::as_str)
            .unwrap_or_default()
    }

    fn args(self) -> Option<&'a Value> {
        self.members.get("args")
    }

    /// An argument of a step of this type.
    fn text(self, kind: &str, name: &str) -> Option<&'a str> {
        self.args()
            .filter(|_| self.kind() == kind)?
            .get(name)?
            .as_str()
    }

    fn scan(self, scan: Scan<'_>, flags: &mut Flags) -> Result<(), Leak> {
        let place = format!("job.steps[{}]", self.index);
        for (name, value) in self.members {
            let place = format!("{place}.{name}");
            match value.as_object().filter(|_| name == "args") {
                Some(args) => self.scan_args(&place, args, scan, flags)?,
                None => scan.name(&place, value, flags)?,
            }
        }
        Ok(())
    }

    fn scan_args(
        self,
        place: &str,
        args: &Map<String, Value>,
        scan: Scan<'_>,
        flags: &mut Flags,
    ) -> Result<(), Leak> {
        if self.kind() == "run_command" {
            return scan.command(place, args, flags);
        }
        for (name, value) in args {
            let place = format!("{place}.{name}");
            match (self.kind(), name.as_str(), value.as_str()) {
                ("write_file", "content", Some(text)) => {
                    scan.file(&place, args, text.as_bytes(), flags)?;
                }
                ("write_file", "content_b64", Some(text)) => {
                    // The handler refuses what is not base64.
                    let bytes = STANDARD.decode(text).unwrap_or_default();
                    scan.file(&place, args, &bytes, flags)?;
                }
                ("apply_unified_diff", "diff", Some(diff)) => {
                    let action = scan.policy.action(Channel::Patches);
                    for patch in readings(diff) {
                        scan_patch(&place, &patch, scan.scanner, action, flags)?;
                    }
                }
                _ => scan.name(&place, value, flags)?,
            }
        }
        Ok(())
    }
}

/// How texts are scanned.
#[derive(Clone, Copy)]
struct Scan<'a> {
    scanner: &'a Scanner,
    policy: ShapePolicy,
}

impl Scan<'_> {
    fn name(self, place: &str, value: &Value, flags: &mut Flags) -> Result<(), Leak> {
        let treatment = leaks::name_treatment(self.policy);
        leaks::scan_member(self.scanner, treatment, place, value, flags)
    }

    fn command(
        self,
        place: &str,
        args: &Map<String, Value>,
        flags: &mut Flags,
    ) -> Result<(), Leak> {
        for (name, value) in args {
            let treatment = match name.as_str() {
                "argv" => self.policy.action(Channel::Argv),
                "env" => self.policy.action(Channel::Env),
                _ => leaks::name_treatment(self.policy),
            };
            let place = format!("{place}.{name}");
            leaks::scan_member(self.scanner, treatment, &place, value, flags)?;
        }
        Ok(())
    }

    /// Scans what a step writes, by its path.
    fn file(
        self,
        place: &str,
        args: &Map<String, Value>,
        content: &[u8],
        flags: &mut Flags,
    ) -> Result<(), Leak> {
        let path = args.get("path").and_then(Value::as_str).unwrap_or_default();
        let action = self.policy.action(Channel::Files);
        leaks::scan_file(self.scanner, action, place, path, content, flags)
    }
}

/// Refuses what the orchestrator would add to the context of a job, if that holds a secret or a
/// credential.
pub(crate) fn check_context(
    orchestrator: &Orchestrator,
    project: Option<ProjectId>,
    added: &Map<String, Value>,
) -> Result<(), ApiError> {
    let policy = orchestrator.shapes.for_project(project);
    let checked = added.iter().try_for_each(|(name, value)| {
        let place = format!("job.context.{name}");
        let member = json!({ place.as_str(): value });
        if let Some((_, hit)) = orchestrator.system_scanner.find_in_json(&member) {
            return Err(Leak::system(&place, hit.what));
        }
        let scan = Scan {
            scanner: &orchestrator.scanner,
            policy,
        };
        scan.name(&place, value, &mut Flags::default())
    });
    checked.map_err(|leak| {
        count_secret();
        leak.error().with_remedy(
            "The task, its project or a preference holds it: remove it there, or give the job a \
             context of its own.",
        )
    })
}

/// Hashes what is written.
#[derive(Default)]
struct HashWriter {
    hash: Sha256,
    size: u64,
}

impl std::io::Write for HashWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.hash.update(bytes);
        self.size += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use cynode_policy::{HeldSecrets, ShapeSetting};

    use super::*;

    fn token() -> String {
        ["gh", "p_", &"A7q3Zx9LmK2vRt5YwB8n".repeat(2)[..36]].concat()
    }

    fn step(kind: &str, args: &Value) -> Value {
        json!({"type": kind, "args": args})
    }

    fn body(steps: &[Value], context: &Value) -> Value {
        json!({"job": {"job_id": "x", "steps": steps, "context": context}})
    }

    fn job(body: &Value) -> SubmittedJob<'_> {
        SubmittedJob::of(Action::JobCreate, body).expect("a job")
    }

    fn scanned(steps: &[Value], context: &Value, setting: Value) -> Result<Vec<String>, Leak> {
        let scanner = Scanner::new(HeldSecrets::new([7; 32]), true);
        let policy = (&serde_json::from_value::<ShapeSetting>(setting).expect("a setting")).into();
        let mut flags = Flags::default();
        job(&body(steps, context)).scan(&scanner, policy, &mut flags)?;
        Ok(flags.flagged.into_iter().map(|file| file.path).collect())
    }

    #[test]
    fn every_command_of_a_job_has_a_program() {
        let body = body(
            &[
                step("run_command", &json!({"argv": ["/bin/git", "push"]})),
                step("run_command", &json!({"argv": ["rm -rf x"], "shell": true})),
                step("run_command", &json!({"argv": ["/bin/git"]})),
                step("write_file", &json!({"argv": ["none"], "path": "a"})),
            ],
            &json!({"acceptance_criteria": ["text", {"text": "t", "check": {"argv": ["make"]}}]}),
        );
        assert_eq!(
            job(&body).programs().into_iter().collect::<Vec<_>>(),
            ["/bin/git", "make", "sh"]
        );
        for other in [json!({}), json!({"job": null}), json!({"job": []})] {
            assert!(SubmittedJob::of(Action::JobCreate, &other).is_none());
        }
        assert!(SubmittedJob::of(Action::SessionExec, &body).is_none());
    }

    #[test]
    fn every_path_that_a_job_writes_is_seen() {
        let diff = "--- a/x\n+++ b/sub/y\n@@ -1,9 +1 @@\n-a\n+b\n";
        let begin = "*** Begin Patch\n*** Delete File: z\n*** End Patch\n";
        let body = body(
            &[
                step("write_file", &json!({"path": ".git/config", "content": ""})),
                step("apply_unified_diff", &json!({"diff": diff})),
                step("apply_unified_diff", &json!({"diff": begin})),
                step("apply_unified_diff", &json!({"diff": "none"})),
                step("read_file", &json!({"path": "read"})),
                step("list_tree", &json!({"path": "listed"})),
            ],
            &Value::Null,
        );
        let paths = job(&body).paths().expect("few");
        assert_eq!(
            paths.into_iter().collect::<Vec<_>>(),
            [".git/config", "sub/y", "x", "z"]
        );
        assert!(check_step_diff(diff).is_ok() && check_step_diff(begin).is_ok());
        assert!(check_step_diff("none").is_err_and(|why| why.contains("file header")));
    }

    #[test]
    fn a_record_has_the_hash_and_the_numbers_of_a_job_and_no_text() {
        let body = body(
            &[
                step("run_command", &json!({"argv": ["hidden"]})),
                step("run_command", &json!({"argv": ["hidden"]})),
                step("made up", &json!({})),
            ],
            &json!({"task_context": "hidden"}),
        );
        let described = job(&body).describe();
        assert_eq!(
            (&described["kind"], &described["steps"], &described["types"]),
            (
                &json!("steps"),
                &json!(3),
                &json!({"run_command": 2, "other": 1})
            )
        );
        let text = body["job"].to_string();
        assert_eq!(described["sha256"], hex::encode(Sha256::digest(&text)));
        assert_eq!(described["size"], text.len());
        assert!(!described.to_string().contains("hidden"));
    }

    #[test]
    fn texts_of_a_job_are_judged_by_their_channel() {
        let run = |args: Value| [step("run_command", &args)];
        let all = json!(true);
        let refused = |steps: &[Value], context: Value, setting: &Value| {
            scanned(steps, &context, setting.clone())
                .expect_err("refused")
                .field
        };
        let argv = run(json!({"argv": ["echo", token()]}));
        assert_eq!(refused(&argv, json!({}), &all), "job.steps[0].args.argv[1]");
        let env = run(json!({"argv": ["x"], "env": {"KEY": token()}}));
        assert_eq!(refused(&env, json!({}), &all), "job.steps[0].args.env.KEY");
        let cwd = run(json!({"argv": ["x"], "cwd": token()}));
        assert_eq!(
            refused(&cwd, json!({}), &json!({"argv": "flag", "env": "flag"})),
            "job.steps[0].args.cwd"
        );
        let flag = json!({"argv": "flag", "env": "flag"});
        assert_eq!(
            scanned(&argv, &json!({}), flag.clone()).expect("flagged"),
            ["job.steps[0].args.argv[1]"]
        );
        let check = json!({"acceptance_criteria": [{"text": "", "check": {"argv": [token()]}}]});
        assert_eq!(
            refused(&[], check.clone(), &all),
            "job.context.acceptance_criteria[0].check.argv[0]"
        );
        assert_eq!(scanned(&[], &check, flag).expect("flagged").len(), 1);
        for context in [
            json!({"additional_context": token()}),
            json!({"requirements": [token()]}),
            json!({"preferences": {"a": {"b": token()}}}),
            json!({"skills": [{"name": "x", "content": token()}]}),
            json!({"acceptance_criteria": [token()]}),
            json!(token()),
        ] {
            let field = refused(&[], context, &all);
            assert!(field.starts_with("job.context"), "{field}");
        }
        assert!(
            scanned(&argv, &json!({"requirements": [token()]}), json!(false))
                .is_ok_and(|flags| flags.is_empty())
        );
    }

    #[test]
    fn written_content_is_judged_by_its_path() {
        let all = json!(true);
        let write = |path: &str| {
            [step(
                "write_file",
                &json!({"path": path, "content": token()}),
            )]
        };
        assert_eq!(
            scanned(&write("src/a.rs"), &json!({}), all.clone()).expect("flagged"),
            ["src/a.rs"]
        );
        let leak = scanned(&write(".env"), &json!({}), all.clone()).expect_err("refused");
        assert_eq!(
            (leak.field.as_str(), leak.path.as_deref()),
            ("job.steps[0].args.content", Some(".env"))
        );
        let encoded = json!({"path": ".env", "content_b64": STANDARD.encode(token())});
        let leak = scanned(&[step("write_file", &encoded)], &json!({}), all.clone());
        assert!(leak.is_err_and(|leak| leak.field == "job.steps[0].args.content_b64"));
        let named = [step("write_file", &json!({"path": token(), "content": ""}))];
        let leak = scanned(&named, &json!({}), all.clone()).expect_err("refused");
        assert_eq!(leak.path, None, "a name that contains a token was repeated");
        let diff = format!("--- a/.env\n+++ b/.env\n@@ -1 +1 @@\n-a\n+A={}\n", token());
        let leak = scanned(
            &[step("apply_unified_diff", &json!({ "diff": diff }))],
            &json!({}),
            all,
        );
        assert!(leak.is_err_and(|leak| {
            leak.field == "job.steps[0].args.diff" && leak.path.as_deref() == Some(".env")
        }));
    }
}
