//! Lists of the user API, the newest items first.

use cynode_api::{
    Artifact, Credential, Group, Image, Job, Node, Page, Project, Promotion, Repository, Session,
    Task, Token, User,
};
use serde::de::DeserializeOwned;

use crate::{Error, Result, SessionClient, UserClient, client::MAX_PAGES};

/// The largest page of the API.
const PAGE_ITEMS: usize = 1_000;

/// An object that the user API lists.
pub trait ListItem: DeserializeOwned {
    const PATH: &'static str;
}

macro_rules! listed {
    ($($object:ty => $path:literal,)*) => { $(impl ListItem for $object { const PATH: &'static str = $path; })* };
}

listed! {
    Artifact => "/v1/artifacts",
    Credential => "/v1/credentials",
    Group => "/v1/groups",
    Image => "/v1/images",
    Job => "/v1/jobs",
    Node => "/v1/nodes",
    Project => "/v1/projects",
    Promotion => "/v1/promotions",
    Repository => "/v1/repositories",
    Session => "/v1/sessions",
    Task => "/v1/tasks",
    Token => "/v1/tokens",
    User => "/v1/users",
}

/// The newest items of a list.
#[derive(Clone, Debug)]
pub struct Listing<T> {
    pub items: Vec<T>,
    /// Whether the list has items beyond these.
    pub has_more: bool,
}

impl SessionClient {
    /// The newest items that the query selects and `keep` accepts, at most `max` of them.
    pub async fn newest<T: ListItem>(
        &self,
        mut query: Vec<(&'static str, String)>,
        max: usize,
        keep: impl Fn(&T) -> bool,
    ) -> Result<Listing<T>> {
        // One item more than wanted tells whether there are more.
        let wanted = max.saturating_add(1);
        query.push(("order", "newest".to_owned()));
        query.push(("limit", wanted.min(PAGE_ITEMS).to_string()));
        let filters = query.len();
        let mut items = Vec::new();
        for _ in 0..MAX_PAGES {
            let page: Page<T> = self.get(T::PATH, &query).await?;
            items.extend(page.items.into_iter().filter(&keep));
            let has_more = items.len() > max;
            if has_more || page.next_cursor.is_none() {
                items.truncate(max);
                return Ok(Listing { items, has_more });
            }
            query.truncate(filters);
            query.extend(page.next_cursor.map(|cursor| ("cursor", cursor)));
        }
        Err(Error::answer(
            self.base(),
            format!("the list has more than {MAX_PAGES} pages"),
        ))
    }
}

impl UserClient {
    /// The newest items that the query selects and `keep` accepts, at most `max` of them.
    pub async fn newest<T: ListItem>(
        &self,
        query: Vec<(&'static str, String)>,
        max: usize,
        keep: impl Fn(&T) -> bool,
    ) -> Result<Listing<T>> {
        self.0.newest(query, max, keep).await
    }
}
