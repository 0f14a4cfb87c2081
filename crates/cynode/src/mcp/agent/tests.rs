//! Tests of the agent file without a server.

use std::collections::BTreeSet;

use super::*;

fn key() -> AgentKey {
    AgentKey {
        server: "http://one".to_owned(),
        directory: "/a".into(),
        uploads_directory: true,
        task: None,
        purpose: "bridge".to_owned(),
    }
}

fn agent(name: &str) -> Agent {
    Agent {
        version: 1,
        server: name.to_owned(),
        directory: "/a".to_owned(),
        task_id: TaskId::generate(),
        token_id: TokenId::generate(),
        token: "cyn_secret".to_owned(),
        expires_at: OffsetDateTime::now_utc() + Duration::from_hours(30),
        has_workspace: false,
    }
}

fn no_user() -> Result<UserClient, Failure> {
    Err(Failure::internal("the user's credential is not needed"))
}

#[test]
fn agents_are_told_apart_by_server_directory_task_and_purpose() {
    let keys: BTreeSet<String> = [
        key(),
        AgentKey {
            server: "http://two".to_owned(),
            ..key()
        },
        AgentKey {
            directory: "/b".into(),
            ..key()
        },
        AgentKey {
            uploads_directory: false,
            ..key()
        },
        AgentKey {
            task: Some(TaskId::generate()),
            ..key()
        },
        AgentKey {
            purpose: "other".to_owned(),
            ..key()
        },
        // Adjacent fields are not confused.
        AgentKey {
            server: "http://one/".to_owned(),
            directory: "a".into(),
            ..key()
        },
    ]
    .iter()
    .map(AgentKey::file_name)
    .collect();
    assert_eq!(keys.len(), 7);
    assert_eq!(key().file_name(), key().file_name());
}

#[tokio::test]
async fn a_valid_token_needs_no_credential_of_the_user() {
    let home = tempfile::tempdir().expect("a directory");
    let state = home.path().join("state/cynode-client");
    let file = AgentFile::new(&state, key(), Lifetime::BRIDGE);
    assert!(file.read().expect("read").is_none());
    assert!(file.current(no_user).await.is_err());
    let stored = agent("http://one");
    file.write(&stored).expect("written");
    assert_eq!(file.current(no_user).await.ok(), Some(stored.clone()));
    // An expiring token that can't be renewed is used until it expires.
    let soon = Agent {
        expires_at: OffsetDateTime::now_utc() + Duration::from_hours(1),
        ..stored.clone()
    };
    file.write(&soon).expect("written");
    assert_eq!(file.current(no_user).await.ok(), Some(soon.clone()));
    // Another process has replaced the token.
    let current = file.instead_of("cyn_older", no_user).await;
    assert_eq!(current.ok(), Some(soon.clone()));
    assert!(file.instead_of("cyn_secret", no_user).await.is_err());
    file.set_workspace(soon.token_id).await.expect("written");
    let read = file.read().expect("read").expect("an agent");
    assert!(read.has_workspace);
    assert_eq!(file.forget().await.ok(), Some(Some(soon.token_id)));
    assert!(file.read().expect("read").is_none());
}

#[tokio::test]
async fn a_damaged_file_and_one_of_another_server_count_as_none() {
    let home = tempfile::tempdir().expect("a directory");
    let state = home.path().join("cynode-client");
    let file = AgentFile::new(&state, key(), Lifetime::BRIDGE);
    drop(file.lock("lock").await.expect("a lock"));
    file.write(&agent("http://two")).expect("written");
    assert!(file.read().expect("read").is_none());
    fs_err::write(&file.path, "{").expect("written");
    assert!(file.read().expect("read").is_none());
}

#[tokio::test]
// invariant: bounded
async fn agents_beyond_the_limit_are_forgotten() {
    let home = tempfile::tempdir().expect("a directory");
    let state = home.path().join("cynode-client");
    let file = AgentFile::new(&state, key(), Lifetime::BRIDGE);
    drop(file.lock("lock").await.expect("a lock"));
    let agents = state.join("agents");
    for number in 0..=MAX_AGENTS {
        fs_err::write(agents.join(format!("{number}.json")), "{}").expect("written");
    }
    file.prune();
    let left = fs_err::read_dir(agents).expect("a directory");
    let left = left.flatten().filter(|entry| {
        entry
            .path()
            .extension()
            .is_some_and(|extension| extension == "json")
    });
    assert_eq!(left.count(), MAX_AGENTS - 1);
}

#[tokio::test]
// invariant: no-secrets-inside
async fn a_file_that_is_open_to_others_is_closed() {
    let home = tempfile::tempdir().expect("a directory");
    let file = AgentFile::new(home.path(), key(), Lifetime::BRIDGE);
    let _lock = file.lock("lock").await.expect("locked");
    file.write(&agent("http://one")).expect("written");
    fs_err::set_permissions(&file.path, Permissions::from_mode(0o644)).expect("opened");
    let found = stored_with_token(home.path(), "cyn_secret").expect("read");
    let mode = fs_err::metadata(&file.path).expect("there").permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    assert!(
        stored_with_token(home.path(), "cyn_other")
            .expect("read")
            .is_none()
    );
    found.expect("stored").remove().expect("removed");
    assert!(file.read().expect("read").is_none());
    assert!(
        stored_with_token(&home.path().join("none"), "x")
            .expect("read")
            .is_none()
    );
}
