//! Finds the object that a command names: by its id, its name, or any part of its id that no other
//! object has.
//!
//! Paths of the API take ids only, so this asks the lists, which filter by name and by part of the
//! id. A whole id needs no call. A name takes precedence over a part of an id.

use std::str::FromStr;

use cynode_api::{
    Artifact, ArtifactId, Credential, CredentialId, Group, GroupId, Image, Job, JobId, Node,
    Project, ProjectId, Promotion, PromotionId, Repository, Session, SessionId, Task, TaskId,
    Token, TokenId, User, UserId, is_session_name,
};
use cynode_client::{ListItem, Listing, SessionClient, SessionFilter, Surface, UserClient};

use crate::{
    commands::short_id,
    directories::{self, Directories},
    failure::{Failure, USAGE},
};

/// Candidates that an error lists.
const CANDIDATES: usize = 10;
/// The length of a whole id.
const ID_LENGTH: usize = 36;

/// An object that a command can name.
trait Nameable: ListItem {
    /// As in `cynode task list`.
    const KIND: &'static str;
    const NOT_FOUND: &'static str = "not_found";
    const HAS_NAMES: bool = true;

    fn id(&self) -> String;
    /// What tells it apart for a person.
    fn name(&self) -> String;
}

macro_rules! nameable {
    ($($object:ty: $kind:literal, $id:ident, $name:expr $(, $constant:ident = $value:expr)*;)*) => {$(
        impl Nameable for $object {
            const KIND: &'static str = $kind;
            $(const $constant: nameable!(@type $constant) = $value;)*

            fn id(&self) -> String {
                self.$id.to_string()
            }

            fn name(&self) -> String {
                let name: fn(&$object) -> String = $name;
                name(self)
            }
        }
    )*};
    (@type HAS_NAMES) => { bool };
    (@type NOT_FOUND) => { &'static str };
}

nameable! {
    Session: "session", session_id, |it| it.name.clone().unwrap_or_else(|| "-".to_owned()),
        NOT_FOUND = "session_not_found";
    Job: "job", job_id, |it| it.state.to_string(), NOT_FOUND = "job_not_found", HAS_NAMES = false;
    Task: "task", id, |it| it.name.clone();
    Token: "token", id, |it| format!("{} of {}", it.kind.as_str(), it.user), HAS_NAMES = false;
    Project: "project", id, |it| it.name.clone();
    User: "user", id, |it| it.name.clone();
    Group: "group", id, |it| it.name.clone();
    Node: "node", id, |it| it.name.clone();
    Image: "image", id, |it| it.name.clone();
    Artifact: "artifact", id, |it| it.path.clone(), HAS_NAMES = false;
    Credential: "credential", id, |it| it.name.clone();
    Repository: "repository", id, |it| it.name.clone(), NOT_FOUND = "repository_not_found";
    Promotion: "promotion", id, |it| it.state.as_str().to_owned(), HAS_NAMES = false;
}

/// The text as a part of an id, if it can be one.
pub fn id_part(text: &str) -> Option<String> {
    let part = text.to_ascii_lowercase();
    let is_part = (1..=ID_LENGTH).contains(&part.len())
        && part
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f' | b'-'));
    is_part.then_some(part)
}

/// A session, by id, name or part of the id. A name means a live session, or else the newest one
/// that had it. `.` is the session of the current directory.
pub async fn session(client: &SessionClient, text: &str) -> Result<SessionId, Failure> {
    if text == "." {
        return Directories::of(client.base())
            .ok_or_else(directories::none_here)?
            .current_session();
    }
    if let Ok(id) = text.parse() {
        return Ok(id);
    }
    let part = id_part(text);
    if client.surface() == Surface::Worker {
        let Some(part) = part else {
            return Err(not_found::<Session>(text)
                .remedy("A worker without an orchestrator knows sessions by id only."));
        };
        let sessions = client.list_sessions(&SessionFilter::default()).await?;
        let mut items: Vec<Session> = sessions
            .into_iter()
            .filter(|session| session.session_id.to_string().contains(&part))
            .collect();
        let has_more = items.len() > CANDIDATES;
        items.truncate(CANDIDATES);
        return only(text, Listing { items, has_more }).map(|session| session.session_id);
    }
    if is_session_name(text) {
        let named = |state: Option<&str>| {
            let mut query = vec![("name", text.to_owned())];
            query.extend(state.map(|state| ("state", state.to_owned())));
            query
        };
        let live = client
            .newest::<Session>(named(Some("creating,running,ending")), CANDIDATES, |_| true)
            .await?;
        if !live.items.is_empty() {
            return only(text, live).map(|session| session.session_id);
        }
        let newest = client.newest::<Session>(named(None), 1, |_| true).await?;
        return newest
            .items
            .first()
            .map(|session| session.session_id)
            .ok_or_else(|| not_found::<Session>(text));
    }
    by_part::<Session>(client, text, Vec::new())
        .await
        .map(|session| session.session_id)
}

pub async fn job(client: &UserClient, text: &str) -> Result<JobId, Failure> {
    id_of::<Job, _>(client, text).await
}

pub async fn task(client: &UserClient, text: &str) -> Result<TaskId, Failure> {
    id_of::<Task, _>(client, text).await
}

pub async fn token(client: &UserClient, text: &str) -> Result<TokenId, Failure> {
    id_of::<Token, _>(client, text).await
}

pub async fn project(client: &UserClient, text: &str) -> Result<ProjectId, Failure> {
    id_of::<Project, _>(client, text).await
}

pub async fn user(client: &UserClient, text: &str) -> Result<UserId, Failure> {
    id_of::<User, _>(client, text).await
}

pub async fn group(client: &UserClient, text: &str) -> Result<GroupId, Failure> {
    id_of::<Group, _>(client, text).await
}

pub async fn node(client: &UserClient, text: &str) -> Result<Node, Failure> {
    match text.parse() {
        Ok(id) => Ok(client.node(id).await?),
        Err(_) => find(client.sessions(), text).await,
    }
}

/// An image, by name or part of the id.
pub async fn image(client: &UserClient, text: &str) -> Result<Image, Failure> {
    match text.parse() {
        Ok(id) => Ok(client.image(id).await?),
        Err(_) => find(client.sessions(), text).await,
    }
}

/// A credential, by name or part of the id. Names are unique within a project.
pub async fn credential(
    client: &UserClient,
    project: Option<ProjectId>,
    text: &str,
) -> Result<CredentialId, Failure> {
    match text.parse() {
        Ok(id) => Ok(id),
        Err(_) => find_within::<Credential>(client.sessions(), text, &of_project(project))
            .await
            .map(|credential| credential.id),
    }
}

/// A repository, by name or part of the id. Names are unique within a project.
pub async fn repository(
    client: &UserClient,
    project: Option<ProjectId>,
    text: &str,
) -> Result<Repository, Failure> {
    match text.parse() {
        Ok(id) => Ok(client.repository(id).await?),
        Err(_) => find_within(client.sessions(), text, &of_project(project)).await,
    }
}

pub async fn promotion(client: &UserClient, text: &str) -> Result<PromotionId, Failure> {
    id_of::<Promotion, _>(client, text).await
}

/// A query for the objects of a project.
pub fn of_project(project: Option<ProjectId>) -> Vec<(&'static str, String)> {
    Vec::from_iter(project.map(|id| ("project_id", id.to_string())))
}

/// An artifact of a task, by part of the id.
pub async fn artifact(
    client: &UserClient,
    task: TaskId,
    text: &str,
) -> Result<ArtifactId, Failure> {
    if let Ok(id) = text.parse() {
        return Ok(id);
    }
    let query = vec![("task_id", task.to_string())];
    by_part::<Artifact>(client.sessions(), text, query)
        .await
        .map(|artifact| artifact.id)
}

/// Finds the object of an option, if the option is given.
pub async fn optional<T>(
    text: Option<&str>,
    find: impl AsyncFnOnce(&str) -> Result<T, Failure>,
) -> Result<Option<T>, Failure> {
    match text {
        Some(text) => find(text).await.map(Some),
        None => Ok(None),
    }
}

async fn id_of<T: Nameable, I: FromStr>(client: &UserClient, text: &str) -> Result<I, Failure> {
    if let Ok(id) = text.parse() {
        return Ok(id);
    }
    let found: T = find(client.sessions(), text).await?;
    found
        .id()
        .parse()
        .map_err(|_| Failure::internal("the server's list has an invalid id"))
}

/// By name, or by part of the id.
async fn find<T: Nameable>(client: &SessionClient, text: &str) -> Result<T, Failure> {
    find_within(client, text, &[]).await
}

/// The same among what a query selects.
async fn find_within<T: Nameable>(
    client: &SessionClient,
    text: &str,
    query: &[(&'static str, String)],
) -> Result<T, Failure> {
    if T::HAS_NAMES {
        let named = [query, &[("name", text.to_owned())]].concat();
        let named = client.newest::<T>(named, CANDIDATES, |_| true).await?;
        if !named.items.is_empty() {
            return only(text, named);
        }
    }
    by_part(client, text, query.to_vec()).await
}

async fn by_part<T: Nameable>(
    client: &SessionClient,
    text: &str,
    mut query: Vec<(&'static str, String)>,
) -> Result<T, Failure> {
    let Some(part) = id_part(text) else {
        return Err(not_found::<T>(text));
    };
    query.push(("id_part", part));
    only(text, client.newest(query, CANDIDATES, |_| true).await?)
}

/// The only item of a list.
fn only<T: Nameable>(text: &str, mut found: Listing<T>) -> Result<T, Failure> {
    if found.items.len() <= 1 && !found.has_more {
        return found.items.pop().ok_or_else(|| not_found::<T>(text));
    }
    let candidates: Vec<String> = found
        .items
        .iter()
        .map(|item| format!("{} ({})", item.name(), short_id(&item.id())))
        .collect();
    let (count, rest) = if found.has_more {
        (format!("more than {CANDIDATES}"), ", …")
    } else {
        (candidates.len().to_string(), "")
    };
    Err(Failure::new(
        USAGE,
        "ambiguous",
        format!(
            "'{text}' fits {count} {}: {}{rest}",
            plural(T::KIND),
            candidates.join(", ")
        ),
    )
    .remedy("Write more digits of the id."))
}

fn plural(kind: &str) -> String {
    match kind.strip_suffix('y') {
        Some(stem) => format!("{stem}ies"),
        None => format!("{kind}s"),
    }
}

fn not_found<T: Nameable>(text: &str) -> Failure {
    let kind = T::KIND;
    let list = match kind {
        "session" | "job" | "task" | "token" | "promotion" => format!("{kind} list --all"),
        "artifact" => "artifact list --task TASK".to_owned(),
        _ => format!("{kind} list"),
    };
    Failure::new(USAGE, T::NOT_FOUND, format!("there is no {kind} '{text}'"))
        .remedy(format!("See 'cynode {list}'."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_an_id_has_its_digits_only() {
        assert_eq!(id_part("7F3a").as_deref(), Some("7f3a"));
        assert_eq!(id_part("0000-7").as_deref(), Some("0000-7"));
        let whole = "01890000-0000-7000-8000-000000000001";
        assert_eq!(id_part(whole).as_deref(), Some(whole));
        for text in ["", "brave-otter", "g", "7f%", &format!("{whole}0")] {
            assert_eq!(id_part(text), None, "{text}");
        }
    }
}
