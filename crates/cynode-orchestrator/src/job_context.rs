//! What a job's specification leaves out of its context, and the orchestrator knows: the project,
//! the task, the preferences.
//!
//! Invariants: what a job says itself is never replaced. What is added is scanned as what callers
//! send is, because it enters a sandbox too. The specification is validated again as a whole.

use std::fmt::Write as _;

use cynode_api::{
    Project, Task,
    sba::{Criterion, JobContext, JobSpec},
};
use cynode_service::{compute, edge::MAX_BODY, json};
use serde_json::{Map, Value};

use crate::{
    Orchestrator,
    caller::Caller,
    db::{self, PreferenceContext, to_json},
    gate,
    instructions::Instruction,
    jobs::Error,
};

const ADDITIONAL_CONTEXT: &str = "agents.sandbox_agent.additional_context";
/// Preferences that configure the system. Those of people's own keys are for their agents.
const SYSTEM_PREFERENCES: [&str; 7] = [
    "agents.",
    "egress.",
    "inference.",
    "quota.",
    "sandbox.",
    "sandbox_images.",
    "secrets.",
];
/// Preferences that a job's context gets, and their keys and values together.
const MAX_PREFERENCES: usize = 256;
const MAX_PREFERENCE_BYTES: usize = 256 * 1024;
/// Criteria that the context of a task summarizes, and the characters of each.
const SUMMARIZED_CRITERIA: usize = 20;
const SUMMARIZED_CHARACTERS: usize = 200;
/// Room in the request to a node for what is not the specification.
const REQUEST_OVERHEAD: usize = 1024 * 1024;

/// A specification whose context is complete.
#[derive(Debug)]
pub(crate) struct ResolvedJob {
    pub(crate) spec: JobSpec,
    /// Its JSON.
    pub(crate) json: String,
}

impl Orchestrator {
    /// Completes the context of a job. An instruction is added to what is known without it.
    pub(crate) async fn resolve_job(
        &self,
        caller: &Caller,
        task: &Task,
        mut spec: JobSpec,
        instruction: Option<Instruction>,
    ) -> Result<ResolvedJob, Error> {
        let project = match task.project_id {
            Some(id) => visible(self.db.project(&caller.scope, id).await)?,
            None => None,
        };
        let known = Known {
            project: project.as_ref(),
            task,
            preferences: self.job_preferences(caller.preferences(task)).await?,
        };
        let context = spec.context.get_or_insert_with(JobContext::default);
        let added = known.fill(context);
        gate::check_context(self, task.project_id, &added)
            .map_err(|denial| Error::Refused(denial.into_problem()))?;
        if let Some(instruction) = instruction {
            instruction.add_to(context);
        }
        if spec.context == Some(JobContext::default()) {
            spec.context = None;
        }
        let json = spec_json(&spec)?;
        let spec = compute::run(json.len(), || JobSpec::parse(json.as_bytes())).await?;
        Ok(ResolvedJob { spec, json })
    }

    /// The preferences in effect that are for agents, and the additional context.
    async fn job_preferences(&self, context: PreferenceContext) -> Result<Preferences, Error> {
        let mut found = Preferences::default();
        let mut after = None;
        loop {
            let page = self.db.effective_preferences(context, after, 1_000).await?;
            for preference in page.items {
                found.add(preference.key, preference.value)?;
            }
            after = page.next_cursor;
            if after.is_none() {
                return Ok(found);
            }
        }
    }
}

/// A project that the caller may see.
fn visible(found: Result<Project, db::Error>) -> Result<Option<Project>, db::Error> {
    match found {
        Ok(project) => Ok(Some(project)),
        Err(db::Error::NotFound(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The JSON of a specification that fits into a request to a node.
fn spec_json(spec: &JobSpec) -> Result<String, Error> {
    let json = serde_json::to_string(spec).unwrap_or_default();
    if json.len() > MAX_BODY - REQUEST_OVERHEAD {
        return Err(Error::TooLarge(format!(
            "job: with its context it has {} bytes; at most {}",
            json.len(),
            MAX_BODY - REQUEST_OVERHEAD
        )));
    }
    json::count(json.as_bytes()).map_err(|error| Error::Refused(error.into_problem()))?;
    Ok(json)
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Preferences {
    additional_context: Option<String>,
    by_key: Map<String, Value>,
    bytes: usize,
}

impl Preferences {
    fn add(&mut self, key: String, value: Value) -> Result<(), Error> {
        if key == ADDITIONAL_CONTEXT {
            self.additional_context = value.as_str().map(str::to_owned);
        }
        if SYSTEM_PREFERENCES
            .iter()
            .any(|prefix| key.starts_with(prefix))
        {
            return Ok(());
        }
        self.bytes += key.len() + value.to_string().len();
        if self.by_key.len() >= MAX_PREFERENCES || self.bytes > MAX_PREFERENCE_BYTES {
            return Err(Error::TooLarge(format!(
                "job.context.preferences: more than {MAX_PREFERENCES} preferences or \
                 {MAX_PREFERENCE_BYTES} bytes of them are in effect; name those that matter in \
                 the job"
            )));
        }
        self.by_key.insert(key, value);
        Ok(())
    }
}

/// What the orchestrator can add to a context.
#[derive(Debug)]
struct Known<'a> {
    project: Option<&'a Project>,
    task: &'a Task,
    preferences: Preferences,
}

impl Known<'_> {
    /// Adds what the context lacks. Returns that, by the names of its fields.
    fn fill(self, context: &mut JobContext) -> Map<String, Value> {
        let Self {
            project,
            task,
            preferences,
        } = self;
        let mut added = Map::new();
        let mut add = |name: &str, value: Value| drop(added.insert(name.to_owned(), value));
        if context.project_context.is_none()
            && let Some(project) = project
        {
            let text = project_context(project);
            add("project_context", text.as_str().into());
            context.project_context = Some(text);
        }
        if context.task_context.is_none() {
            let text = task_context(task);
            add("task_context", text.as_str().into());
            context.task_context = Some(text);
        }
        if context.requirements.is_empty() && !task.requirements.is_empty() {
            add("requirements", to_json(&task.requirements));
            context.requirements.clone_from(&task.requirements);
        }
        if context.acceptance_criteria.is_empty() && !task.acceptance_criteria.is_empty() {
            add("acceptance_criteria", to_json(&task.acceptance_criteria));
            let criteria = task.acceptance_criteria.iter().cloned();
            context.acceptance_criteria = criteria.map(Criterion::Text).collect();
        }
        if context.preferences.is_empty() && !preferences.by_key.is_empty() {
            add("preferences", Value::Object(preferences.by_key.clone()));
            context.preferences = preferences.by_key;
        }
        if context.additional_context.is_none()
            && let Some(text) = preferences.additional_context
        {
            add("additional_context", text.as_str().into());
            context.additional_context = Some(text);
        }
        added
    }
}

fn project_context(project: &Project) -> String {
    let mut text = format!(
        "Project: {}\nId: {}\nSlug: {}\n",
        project.name, project.id, project.slug
    );
    describe(&mut text, "Scope", project.scope.as_deref());
    metadata(&mut text, &project.metadata);
    text
}

fn task_context(task: &Task) -> String {
    let mut text = format!(
        "Task: {}\nId: {}\nStatus: {}\n",
        task.name,
        task.id,
        task.status.as_str()
    );
    describe(&mut text, "Description", task.description.as_deref());
    summarize(&mut text, &task.acceptance_criteria);
    metadata(&mut text, &task.metadata);
    text
}

fn describe(text: &mut String, title: &str, value: Option<&str>) {
    if let Some(value) = value.filter(|value| !value.trim().is_empty()) {
        // Writing to a string can't fail.
        let _written = writeln!(text, "{title}:\n{}", value.trim_end());
    }
}

fn summarize(text: &mut String, criteria: &[String]) {
    if criteria.is_empty() {
        return;
    }
    let _written = writeln!(text, "Acceptance criteria ({}):", criteria.len());
    for criterion in criteria.iter().take(SUMMARIZED_CRITERIA) {
        let line = criterion.lines().next().unwrap_or_default();
        let short: String = line.chars().take(SUMMARIZED_CHARACTERS).collect();
        let more = if short.len() < criterion.trim_end().len() {
            "…"
        } else {
            ""
        };
        let _written = writeln!(text, "- {short}{more}");
    }
    if criteria.len() > SUMMARIZED_CRITERIA {
        let _written = writeln!(text, "- and {} more", criteria.len() - SUMMARIZED_CRITERIA);
    }
}

fn metadata(text: &mut String, metadata: &Map<String, Value>) {
    if !metadata.is_empty() {
        let _written = writeln!(text, "Metadata: {}", to_json(metadata));
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::{TaskId, TaskStatus};
    use serde_json::json;
    use time::OffsetDateTime;

    use super::*;

    fn task() -> Task {
        Task {
            id: TaskId::generate(),
            project_id: None,
            name: "fix the build".to_owned(),
            description: Some("It is red.\n".to_owned()),
            requirements: vec!["stay on 2024".to_owned()],
            acceptance_criteria: vec!["make test passes\nwithout retries".to_owned()],
            status: TaskStatus::Active,
            profile: None,
            metadata: Map::from_iter([("ticket".to_owned(), json!(7))]),
            created_by: "ada".to_owned(),
            created_at: OffsetDateTime::UNIX_EPOCH,
            updated_at: OffsetDateTime::UNIX_EPOCH,
        }
    }

    fn preferences(pairs: &[(&str, Value)]) -> Preferences {
        let mut found = Preferences::default();
        for (key, value) in pairs {
            found.add((*key).to_owned(), value.clone()).expect("few");
        }
        found
    }

    #[test]
    fn a_task_says_what_an_agent_has_to_know_of_it() {
        let task = task();
        assert_eq!(
            task_context(&task),
            format!(
                "Task: fix the build\nId: {}\nStatus: active\nDescription:\nIt is red.\n\
                 Acceptance criteria (1):\n- make test passes…\nMetadata: {{\"ticket\":7}}\n",
                task.id
            )
        );
        let many = Task {
            acceptance_criteria: vec!["x".repeat(1_000); 25],
            ..task
        };
        let text = task_context(&many);
        assert!(
            text.contains("- and 5 more\n") && text.len() < 6_000,
            "{text}"
        );
    }

    #[test]
    fn preferences_of_the_system_stay_out() {
        let found = preferences(&[
            ("style.indent", json!(4)),
            ("quota.sandboxes", json!(3)),
            ("secrets.shapes", json!(true)),
            (ADDITIONAL_CONTEXT, json!("be brief")),
            ("agents.other", json!("x")),
        ]);
        assert_eq!(
            found.by_key,
            Map::from_iter([("style.indent".to_owned(), json!(4))])
        );
        assert_eq!(found.additional_context.as_deref(), Some("be brief"));
    }

    #[test]
    fn too_many_preferences_are_refused() {
        let mut found = Preferences::default();
        let refused = |found: &mut Preferences, key: String, value: Value| {
            matches!(found.add(key, value), Err(Error::TooLarge(_)))
        };
        for number in 0..MAX_PREFERENCES {
            assert!(!refused(&mut found, format!("k{number}"), json!(1)));
        }
        assert!(refused(&mut found, "one.more".to_owned(), json!(1)));
        let long = json!("x".repeat(MAX_PREFERENCE_BYTES));
        assert!(refused(&mut Preferences::default(), "k".to_owned(), long));
    }

    #[test]
    fn what_a_job_says_itself_is_kept_and_what_is_added_is_named() {
        let task = task();
        let mut context = JobContext {
            task_context: Some("mine".to_owned()),
            preferences: Map::from_iter([("a".to_owned(), json!("mine"))]),
            ..JobContext::default()
        };
        let known = Known {
            project: None,
            task: &task,
            preferences: preferences(&[
                ("a", json!("theirs")),
                (ADDITIONAL_CONTEXT, json!("more")),
            ]),
        };
        let added = known.fill(&mut context);
        assert_eq!(context.task_context.as_deref(), Some("mine"));
        assert_eq!(context.preferences["a"], "mine");
        assert_eq!(context.requirements, task.requirements);
        let mut names: Vec<&String> = added.keys().collect();
        names.sort();
        assert_eq!(
            names,
            ["acceptance_criteria", "additional_context", "requirements"]
        );
    }
}
