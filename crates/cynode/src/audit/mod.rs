//! `audit`: reading the trail, and verifying it here or there.

mod export;
mod offline;
mod show;
mod tail;
mod verify;

use std::time::Duration;

use cynode_api::event_limits;
use cynode_client::{AuditFilter, RawAuditPage, UserClient};

use crate::{
    cli::{Audit, Globals},
    connect,
    failure::Failure,
    plane::Outcome,
};

pub async fn run(globals: &Globals, command: Audit) -> Outcome {
    match command {
        Audit::Tail(args) => tail::run(&connect::plane(globals)?, globals, &args).await,
        Audit::Show { of } => show::run(&connect::plane(globals)?, globals, of).await,
        Audit::Verify(args) => match (&args.file, args.key) {
            // Speaks with nobody, and so needs nobody.
            (Some(file), Some(key)) => offline::run(globals, file, key),
            _ => verify::run(&connect::plane(globals)?, globals, args.key).await,
        },
        Audit::Export(args) => export::run(&connect::plane(globals)?, &args).await,
    }
}

/// The next page of those that are there already; `None` at their end. A page that is neither full nor truncated is the last one:
/// reading is in the trail too, so that there would be always one more.
async fn next_page(
    client: &UserClient,
    after: &mut Option<i64>,
    filter: &AuditFilter,
) -> Result<Option<RawAuditPage>, Failure> {
    let Some(from) = *after else { return Ok(None) };
    let page = client.raw_audit(from, filter, Duration::ZERO).await?;
    *after = (page.truncated || page.items.len() >= event_limits::MAX_PAGE as usize)
        .then_some(page.next_cursor);
    Ok(Some(page))
}
