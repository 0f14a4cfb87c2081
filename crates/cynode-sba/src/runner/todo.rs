//! The todo list of a job.
//!
//! Initially it has the job's requirements, acceptance criteria and steps. A step is checked off
//! when it succeeds. A requirement or criterion stays open until it is verified explicitly, so the
//! list of a successful job still shows what is unverified.
//!
//! Invariants: ids are never reused. The parts of an item directly follow it, and it is done if and
//! only if all of them are. The list stays within its bounds.

use std::fmt;

use cynode_api::sba::{Action, JobSpec, Step, TodoSummary};
use serde::{Deserialize, Serialize};

/// Items per list: twice as many as the largest job starts with.
const MAX_ITEMS: usize = 12_288;
/// Longer titles are cut.
const MAX_TITLE_BYTES: usize = 256;
/// Open titles in a summary.
const MAX_OPEN_TITLES: usize = 100;

/// The origin of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Source {
    Requirement,
    Criterion,
    Step,
    /// Added while the job ran.
    Added,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Item {
    pub(super) id: u64,
    pub(super) title: String,
    pub(super) source: Source,
    pub(super) done: bool,
    /// The item of which this one is a part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) parent: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TodoList {
    items: Vec<Item>,
    /// The id of the next new item.
    next_id: u64,
}

/// Why a change was refused. The list is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TodoError {
    /// No item has this id.
    Unknown(u64),
    /// The list is full.
    Full,
    /// The item has parts, which determine whether it is done.
    HasParts(u64),
    /// The new order does not contain each id once, or separates parts from their item.
    NotAnOrder,
}

impl fmt::Display for TodoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(id) => write!(f, "the todo list has no item {id}"),
            Self::Full => write!(f, "the todo list is full"),
            Self::HasParts(id) => write!(f, "item {id} has parts; change those"),
            Self::NotAnOrder => f.write_str(
                "ids must name every item of the list once, with parts right after their item",
            ),
        }
    }
}

impl TodoList {
    /// The initial list of a job. The ids depend on the job only.
    pub(super) fn of(job: &JobSpec) -> Self {
        let mut list = Self::default();
        if let Some(context) = &job.context {
            for requirement in &context.requirements {
                list.push(requirement, Source::Requirement);
            }
            for criterion in &context.acceptance_criteria {
                list.push(criterion.text(), Source::Criterion);
            }
        }
        for step in &job.steps {
            list.push(&title_of(step), Source::Step);
        }
        list
    }

    /// Parses a stored list. Refuses one that the operations below can't have produced for this
    /// job.
    pub(super) fn resumed(json: &[u8], job: &JobSpec) -> Option<Self> {
        let list: Self = serde_json::from_slice(json).ok()?;
        let fresh = Self::of(job);
        let is_bounded = list.items.len() <= MAX_ITEMS
            && list
                .items
                .iter()
                .all(|item| item.id < list.next_id && item.title == title(&item.title));
        let has_all = fresh.items.iter().all(|fresh| {
            list.get(fresh.id)
                .is_some_and(|item| (&item.title, item.source) == (&fresh.title, fresh.source))
        });
        (is_bounded && has_all && list.is_ordered()).then_some(list)
    }

    fn push(&mut self, text: &str, source: Source) {
        self.items.push(Item {
            id: self.next_id,
            title: title(text),
            source,
            done: false,
            parent: None,
        });
        self.next_id += 1;
    }

    pub(super) fn items(&self) -> &[Item] {
        &self.items
    }

    fn get(&self, id: u64) -> Option<&Item> {
        self.items.iter().find(|item| item.id == id)
    }

    fn position(&self, id: u64) -> Result<usize, TodoError> {
        let position = self.items.iter().position(|item| item.id == id);
        position.ok_or(TodoError::Unknown(id))
    }

    /// Marks a step and its parts as done or open.
    pub(super) fn set_step(&mut self, index: usize, done: bool) {
        self.set(Source::Step, index, done);
    }

    /// The same for an acceptance criterion.
    pub(super) fn set_criterion(&mut self, index: usize, done: bool) {
        self.set(Source::Criterion, index, done);
    }

    fn set(&mut self, source: Source, index: usize, done: bool) {
        // Items of one source have consecutive ids, wherever they are moved to.
        let items = self.items.iter().filter(|item| item.source == source);
        let Some(first) = items.map(|item| item.id).min() else {
            return;
        };
        let mut changed = vec![first + index as u64];
        for item in &mut self.items {
            let is_part = item.parent.is_some_and(|parent| changed.contains(&parent));
            if (item.id == changed[0] && item.source == source) || is_part {
                item.done = done;
                changed.push(item.id);
            }
        }
    }

    /// Appends an item; returns its id.
    pub(super) fn add(&mut self, text: &str) -> Result<u64, TodoError> {
        if self.items.len() >= MAX_ITEMS {
            return Err(TodoError::Full);
        }
        self.push(text, Source::Added);
        Ok(self.next_id - 1)
    }

    /// Marks an item as done, and each parent whose parts are now all done.
    pub(super) fn complete(&mut self, id: u64) -> Result<(), TodoError> {
        let position = self.position(id)?;
        if self.items.iter().any(|item| item.parent == Some(id)) {
            return Err(TodoError::HasParts(id));
        }
        self.items[position].done = true;
        let mut parent = self.items[position].parent;
        while let Some(id) = parent {
            let is_done = |item: &Item| item.parent != Some(id) || item.done;
            if !self.items.iter().all(is_done) {
                break;
            }
            let position = self.position(id)?;
            self.items[position].done = true;
            parent = self.items[position].parent;
        }
        Ok(())
    }

    /// Splits an item into parts, which follow it. Returns their ids.
    pub(super) fn split(&mut self, id: u64, parts: &[&str]) -> Result<Vec<u64>, TodoError> {
        let position = self.position(id)?;
        if self.items.iter().any(|item| item.parent == Some(id)) {
            return Err(TodoError::HasParts(id));
        }
        if self.items.len() + parts.len() > MAX_ITEMS {
            return Err(TodoError::Full);
        }
        let ids: Vec<u64> = (self.next_id..).take(parts.len()).collect();
        let items = ids.iter().zip(parts).map(|(part, text)| Item {
            id: *part,
            title: title(text),
            source: Source::Added,
            done: false,
            parent: Some(id),
        });
        self.items.splice(position + 1..=position, items);
        if !ids.is_empty() {
            self.next_id += ids.len() as u64;
            self.reopen(Some(id));
        }
        Ok(ids)
    }

    fn reopen(&mut self, mut id: Option<u64>) {
        while let Some(position) = id.and_then(|id| self.position(id).ok()) {
            self.items[position].done = false;
            id = self.items[position].parent;
        }
    }

    /// Reorders the items by a list of their ids.
    pub(super) fn reorder(&mut self, ids: &[u64]) -> Result<(), TodoError> {
        if ids.len() != self.items.len() {
            return Err(TodoError::NotAnOrder);
        }
        let mut left = std::collections::BTreeMap::new();
        for item in &self.items {
            left.insert(item.id, item.clone());
        }
        let items = ids.iter().map(|id| left.remove(id));
        let items: Option<Vec<Item>> = items.collect();
        let list = Self {
            items: items.ok_or(TodoError::NotAnOrder)?,
            next_id: self.next_id,
        };
        if !list.is_ordered() {
            return Err(TodoError::NotAnOrder);
        }
        *self = list;
        Ok(())
    }

    /// Returns whether ids are unique and the parts of each item directly follow it.
    fn is_ordered(&self) -> bool {
        let mut seen = std::collections::BTreeSet::new();
        let mut above: Vec<u64> = Vec::new();
        for item in &self.items {
            if !seen.insert(item.id) {
                return false;
            }
            while let Some(last) = above.last()
                && item.parent != Some(*last)
            {
                above.pop();
            }
            if item.parent.is_some() && above.is_empty() {
                return false;
            }
            above.push(item.id);
        }
        true
    }

    pub(super) fn summary(&self) -> TodoSummary {
        self.short_summary(MAX_OPEN_TITLES)
    }

    /// A summary with at most this many titles.
    pub(super) fn short_summary(&self, titles: usize) -> TodoSummary {
        let open = self.items.iter().filter(|item| !item.done);
        TodoSummary {
            total: self.items.len() as u64,
            done: self.items.iter().filter(|item| item.done).count() as u64,
            open: open.take(titles).map(|item| item.title.clone()).collect(),
        }
    }
}

/// Cuts a title to one line of bounded length.
fn title(text: &str) -> String {
    let mut title = String::new();
    for word in text.split(|character: char| character.is_whitespace() || character.is_control()) {
        if word.is_empty() {
            continue;
        }
        if !title.is_empty() {
            title.push(' ');
        }
        title.push_str(word);
        if title.len() > MAX_TITLE_BYTES {
            break;
        }
    }
    if title.len() > MAX_TITLE_BYTES {
        title.truncate(title.floor_char_boundary(MAX_TITLE_BYTES - '…'.len_utf8()));
        title.push('…');
    }
    title
}

fn title_of(step: &Step) -> String {
    let subject = match &step.action {
        Action::RunCommand(command) => command.argv.join(" "),
        Action::WriteFile(file) => file.path.clone(),
        Action::ReadFile(file) => file.path.clone(),
        Action::ApplyUnifiedDiff(_) => String::new(),
        Action::ListTree(tree) => tree.path.clone().unwrap_or_else(|| ".".to_owned()),
    };
    let kind = step.action.name();
    match &step.id {
        Some(id) => format!("{id}: {kind} {subject}"),
        None => format!("{kind} {subject}"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn job() -> JobSpec {
        JobSpec::from_value(serde_json::json!({
            "protocol_version": "1.0",
            "job_id": "01936f3e-7c4a-7b1e-9a55-0242ac120002",
            "task_id": "01936f3e-7c4a-7b1e-9a55-0242ac120003",
            "constraints": {"max_runtime_seconds": 1, "max_output_bytes": 1},
            "context": {
                "requirements": ["It  works\n"],
                "acceptance_criteria": ["Tests pass", {"text": "Builds", "check": {"argv": ["make"]}}],
            },
            "steps": [
                {"type": "run_command", "args": {"argv": ["make", "test"]}, "id": "test"},
                {"type": "list_tree", "args": {}},
            ],
        }))
        .expect("a job")
    }

    fn titles(list: &TodoList) -> Vec<&str> {
        list.items()
            .iter()
            .map(|item| item.title.as_str())
            .collect()
    }

    #[test]
    fn a_list_begins_with_requirements_criteria_and_steps() {
        let mut list = TodoList::of(&job());
        let expected = [
            "It works",
            "Tests pass",
            "Builds",
            "test: run_command make test",
            "list_tree .",
        ];
        assert_eq!(titles(&list), expected);
        list.set_step(0, true);
        list.set_step(7, true);
        let summary = list.summary();
        assert_eq!((summary.total, summary.done), (5, 1));
        assert_eq!(
            summary.open,
            ["It works", "Tests pass", "Builds", "list_tree ."]
        );
        assert_eq!(list.short_summary(1).open, ["It works"]);
        list.set_step(0, false);
        assert_eq!(list, TodoList::of(&job()));
        list.set_criterion(1, true);
        list.set_criterion(2, true);
        assert_eq!(list.summary().open.len(), 4);
        assert!(!list.summary().open.contains(&"Builds".to_owned()));
    }

    #[test]
    fn a_step_is_done_with_all_its_parts() {
        let mut list = TodoList::of(&job());
        let parts = list.split(3, &["x", "y"]).expect("split");
        list.split(parts[1], &["z"]).expect("split");
        list.set_step(0, true);
        assert_eq!(
            list.summary().open,
            ["It works", "Tests pass", "Builds", "list_tree ."]
        );
    }

    #[test]
    fn an_item_is_done_when_all_its_parts_are() {
        let mut list = TodoList::of(&job());
        let parts = list.split(0, &["first", "second"]).expect("split");
        assert_eq!(&titles(&list)[..3], ["It works", "first", "second"]);
        let inner = list.split(parts[0], &["deep"]).expect("split");
        assert_eq!(list.complete(0), Err(TodoError::HasParts(0)));
        list.complete(parts[1]).expect("done");
        assert!(!list.get(0).expect("an item").done);
        list.complete(inner[0]).expect("done");
        assert!(
            [0, parts[0]]
                .iter()
                .all(|id| list.get(*id).expect("an item").done)
        );
        assert_eq!(
            list.split(parts[0], &["x"]),
            Err(TodoError::HasParts(parts[0]))
        );
        list.split(parts[1], &["more"]).expect("split");
        assert!(!list.get(0).expect("an item").done);
        assert_eq!(list.split(0, &[]), Err(TodoError::HasParts(0)));
        assert_eq!(list.complete(99), Err(TodoError::Unknown(99)));
    }

    #[test]
    fn a_new_order_names_every_item_once_and_keeps_parts_together() {
        let mut list = TodoList::of(&job());
        let parts = list.split(4, &["x", "y"]).expect("split");
        let [x, y] = parts[..] else {
            panic!("two parts")
        };
        for bad in [
            &[0, 1, 2, 3, 4, x][..],
            &[0, 0, 1, 2, 3, 4, x],
            &[0, 1, 2, 3, 4, x, 99],
            &[x, 4, y, 0, 1, 2, 3],
            &[4, x, 0, y, 1, 2, 3],
        ] {
            let before = list.clone();
            assert_eq!(list.reorder(bad), Err(TodoError::NotAnOrder), "{bad:?}");
            assert_eq!(list, before);
        }
        list.reorder(&[4, y, x, 3, 2, 1, 0]).expect("an order");
        assert_eq!(titles(&list)[..3], ["list_tree .", "y", "x"]);
        list.set_step(0, true);
        assert!(list.get(3).expect("the first step").done);
    }

    #[test]
    fn a_list_has_bounds_and_titles_are_single_lines() {
        let mut list = TodoList::of(&job());
        while list.add("more").is_ok() {}
        assert_eq!(list.items().len(), MAX_ITEMS);
        assert_eq!(list.split(0, &["x"]), Err(TodoError::Full));
        let mut list = TodoList::default();
        list.add(&"ä".repeat(1_000)).expect("room");
        assert!(list.items()[0].title.len() <= MAX_TITLE_BYTES);
        assert!(list.items()[0].title.ends_with("ä…"));
    }

    #[test]
    fn a_stored_list_is_resumed_only_for_its_job() {
        let mut list = TodoList::of(&job());
        list.add("more").expect("room");
        list.split(1, &["part"]).expect("split");
        list.complete(0).expect("done");
        let json = serde_json::to_vec(&list).expect("JSON");
        assert_eq!(TodoList::resumed(&json, &job()), Some(list.clone()));
        let changes: [fn(&mut TodoList); 6] = [
            |list| list.items[0].title = "other".to_owned(),
            |list| list.items[0].id = 4,
            |list| drop(list.items.remove(4)),
            |list| list.next_id = 2,
            |list| list.items[1].parent = Some(6),
            |list| list.items[6].title = "two\nlines".to_owned(),
        ];
        for change in changes {
            let mut changed = list.clone();
            change(&mut changed);
            let json = serde_json::to_vec(&changed).expect("JSON");
            assert_eq!(TodoList::resumed(&json, &job()), None, "{changed:?}");
        }
        assert_eq!(TodoList::resumed(b"{}", &job()), None);
    }

    #[derive(Clone, Debug)]
    enum Change {
        Add,
        Complete(u64),
        Split(u64, usize),
        Reverse,
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            Just(Change::Add),
            (0_u64..20).prop_map(Change::Complete),
            (0_u64..20, 0_usize..3).prop_map(|(id, count)| Change::Split(id, count)),
            Just(Change::Reverse),
        ]
    }

    proptest! {
        #[test]
        fn any_changes_leave_a_list_that_can_be_resumed(
            changes in proptest::collection::vec(change(), 0..30),
        ) {
            let mut list = TodoList::of(&job());
            for change in changes {
                let before = list.clone();
                let refused = match change {
                    Change::Add => list.add("added").is_err(),
                    Change::Complete(id) => list.complete(id).is_err(),
                    Change::Split(id, count) => list.split(id, &["part"; 3][..count]).is_err(),
                    Change::Reverse => {
                        let ids: Vec<u64> = list.items().iter().rev().map(|item| item.id).collect();
                        list.reorder(&ids).is_err()
                    }
                };
                prop_assert!(!refused || list == before);
                for item in list.items() {
                    let mut parts = list.items().iter().filter(|part| part.parent == Some(item.id));
                    if parts.clone().next().is_some() {
                        prop_assert_eq!(item.done, parts.all(|part| part.done));
                    }
                }
            }
            let json = serde_json::to_vec(&list).expect("JSON");
            prop_assert_eq!(TodoList::resumed(&json, &job()), Some(list));
        }
    }
}
