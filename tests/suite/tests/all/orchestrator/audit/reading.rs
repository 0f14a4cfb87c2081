//! Reading the trail: by page, by filter, from the end, and live.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{AuditDecision, AuditPage, TaskCreate};
use cynode_client::AuditFilter;
use cynode_tests::{Answer, ControlPlane};
use http::Method;
use serde_json::{Value, json};

use super::{body, call_id, records, request};
use crate::orchestrator::cluster::text;

// part of: ISC-22
#[tokio::test]
async fn the_trail_is_read_by_page_by_filter_from_the_end_and_live() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let orchestrator = control_plane.orchestrator("", &[]).await?;
    let (client, admin) = (orchestrator.client()?, orchestrator.token()?);
    let get = async |query: &str| {
        Answer::of(request(
            &orchestrator,
            &admin,
            Method::GET,
            &format!("/v1/audit?{query}"),
        )?)
        .await
    };
    let page = async |query: &str| {
        let answer = get(query).await?;
        ensure!(
            answer.status == 200,
            "{query}: {}",
            String::from_utf8_lossy(&answer.body)
        );
        anyhow::Ok(serde_json::from_slice::<AuditPage>(&answer.body)?)
    };
    let post = async |token: &str, path: &str, value: Value| {
        Answer::of(request(&orchestrator, token, Method::POST, path)?.json(&value)).await
    };
    post(&admin, "/v1/users", json!({"name": "ada"})).await?;
    let ada = text(
        &body(&post(&admin, "/v1/tokens", json!({"kind": "user", "user": "ada"})).await?)?["token"],
    )?;
    let mut by_ada = Vec::new();
    for name in ["one", "two", "three"] {
        by_ada.push(post(&ada, "/v1/tasks", json!({"name": name})).await?);
        client
            .create_task(&TaskCreate {
                name: name.to_owned(),
                ..Default::default()
            })
            .await?;
    }
    let denied = post(&ada, "/v1/users", json!({"name": "eve"})).await?;
    assert_eq!(denied.outcome(), (403, "denied_by_policy".to_owned()));

    // Pages of any size add up to the whole trail, in order and without gaps.
    let whole = records(&client, &AuditFilter::default()).await?;
    let end = whole.last().context("there are records")?.cursor;
    ensure!(
        whole.iter().map(|record| record.cursor).eq(1..=end),
        "cursors have gaps"
    );
    for limit in [1, 3, 7, 1000] {
        let (mut all, mut after) = (Vec::new(), 0);
        while after < end {
            let page = page(&format!("limit={limit}&after={after}")).await?;
            ensure!(
                !page.items.is_empty() && page.items.len() <= limit,
                "{limit}"
            );
            ensure!(
                page.items.last().map(|record| record.cursor) == Some(page.next_cursor),
                "{limit}"
            );
            after = page.next_cursor;
            all.extend(page.items);
        }
        all.truncate(whole.len());
        assert_eq!(all, whole, "{limit}");
    }
    let beyond = page(&format!("after={}", end + 1_000_000)).await?;
    assert_eq!(
        (beyond.items.len(), beyond.next_cursor),
        (0, end + 1_000_000)
    );
    // From the end: the records before this call.
    for tail in [0, 1, 5] {
        let before: i64 = control_plane
            .postgres
            .query("select last from audit_head")?
            .parse()?;
        let page = page(&format!("tail={tail}")).await?;
        assert_eq!(
            page.items
                .iter()
                .map(|record| record.cursor)
                .collect::<Vec<_>>(),
            (before - tail + 1..=before).collect::<Vec<_>>()
        );
    }
    assert_eq!(page("tail=1000000&limit=1").await?.items[0], whole[0]);

    // Filters, alone and combined, against the same selection from the whole trail.
    let whole = records(&client, &AuditFilter::default()).await?;
    let end = whole.last().context("there are records")?.cursor;
    let call = call_id(&by_ada[0])?;
    let (early, late) = (whole[whole.len() / 3].at, whole[2 * whole.len() / 3].at);
    let filter = AuditFilter::default;
    let cases: Vec<(AuditFilter, usize)> = vec![
        (
            AuditFilter {
                call: Some(call.clone()),
                ..filter()
            },
            2,
        ),
        (
            AuditFilter {
                subject: Some("ada".to_owned()),
                ..filter()
            },
            8,
        ),
        (
            AuditFilter {
                subject: Some("nobody at all".to_owned()),
                ..filter()
            },
            0,
        ),
        (
            AuditFilter {
                action: Some("task.create".to_owned()),
                ..filter()
            },
            12,
        ),
        (
            AuditFilter {
                action: Some("task.create".to_owned()),
                subject: Some("ada".to_owned()),
                ..filter()
            },
            6,
        ),
        (
            AuditFilter {
                decision: Some(AuditDecision::Deny),
                ..filter()
            },
            2,
        ),
        (
            AuditFilter {
                decision: Some(AuditDecision::Allow),
                subject: Some("ada".to_owned()),
                ..filter()
            },
            3,
        ),
        (
            AuditFilter {
                decision: Some(AuditDecision::Deny),
                subject: Some("admin".to_owned()),
                ..filter()
            },
            0,
        ),
    ];
    for (filter, count) in cases {
        let found = records(&client, &filter).await?;
        let expected: Vec<_> = whole
            .iter()
            .filter(|record| {
                let body = &record.body;
                filter
                    .call
                    .as_ref()
                    .is_none_or(|call| body.call_id.is_some_and(|id| id.to_string() == *call))
                    && filter.subject.as_deref().is_none_or(|name| {
                        body.subject
                            .as_ref()
                            .and_then(|subject| subject.name.as_deref())
                            == Some(name)
                    })
                    && filter
                        .action
                        .as_ref()
                        .is_none_or(|action| body.action == *action)
                    && filter
                        .decision
                        .is_none_or(|decision| body.decision == Some(decision))
            })
            .cloned()
            .collect();
        let found: Vec<_> = found
            .into_iter()
            .filter(|record| record.cursor <= end)
            .collect();
        assert_eq!((&found, found.len()), (&expected, count), "{filter:?}");
    }
    // A time range includes its start and excludes its end.
    let between = records(
        &client,
        &AuditFilter {
            since: Some(early),
            until: Some(late),
            ..filter()
        },
    )
    .await?;
    let expected: Vec<_> = whole
        .iter()
        .filter(|record| record.at >= early && record.at < late)
        .cloned()
        .collect();
    ensure!(!expected.is_empty() && between == expected, "{between:#?}");

    // A wait ends with the first matching record, or when it times out.
    let after = whole.last().context("there are records")?.cursor;
    let query = |wait: u64| format!("after={after}&action=task.create&wait_ms={wait}");
    let nothing = page(&query(400)).await?;
    assert_eq!((nothing.items.len(), nothing.next_cursor), (0, after));
    let (started, long, task) = (
        Instant::now(),
        query(50_000),
        TaskCreate {
            name: "news".to_owned(),
            ..Default::default()
        },
    );
    let (news, made) = tokio::join!(page(&long), client.create_task(&task));
    let (news, made) = (news?, made?);
    ensure!(
        started.elapsed() < Duration::from_secs(40),
        "the wait did not end early: {:?}",
        started.elapsed()
    );
    assert_eq!(news.items[0].body.detail["name"], json!("news"), "{made:?}");

    for (query, word) in [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("after=-1", "after"),
        ("after=1&tail=1", "tail"),
        ("wait_ms=60001", "wait_ms"),
        ("decision=maybe", "decision"),
        ("since=yesterday", "since"),
        ("session_id=7", "session_id"),
        ("colour=red", "colour"),
    ] {
        let refused = get(query).await?;
        assert_eq!(
            refused.outcome(),
            (400, "invalid_request".to_owned()),
            "{query}"
        );
        ensure!(
            refused.problem()?.detail.contains(word),
            "{query}: {}",
            refused.problem()?.detail
        );
    }
    // Only administrators may read it, and refused readers are recorded.
    for path in ["/v1/audit", "/v1/audit/verify", "/v1/audit/checkpoints"] {
        let (refused, call_record) =
            super::call(&client, request(&orchestrator, &ada, Method::GET, path)?).await?;
        assert_eq!(
            (refused.outcome(), call_record.intent.body.decision),
            (
                (403, "denied_by_policy".to_owned()),
                Some(AuditDecision::Deny)
            ),
            "{path}"
        );
    }
    Ok(())
}

#[tokio::test]
// invariant: audit-trail
async fn records_that_a_node_dates_back_hide_no_others_and_are_found_themselves() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let orchestrator = control_plane.orchestrator("", &[]).await?;
    let client = orchestrator.client()?;
    let create = async |name: &str| {
        let task = TaskCreate {
            name: name.to_owned(),
            ..Default::default()
        };
        client.create_task(&task).await
    };
    create("first").await?;
    control_plane.postgres.query(
        "with stream as (insert into audit_streams (stream, writer, hash, node_id, lease_until)
             values ('0190a3b0-0000-7000-8000-000000000003', 'node', decode(repeat('00', 32), 'hex'), '0190a3b0-0000-7000-8000-000000000004', 'infinity') returning stream),
         head as (update audit_head set last = last + 300 returning last - 300 as base)
         insert into audit_events (cursor, stream, seq, at, body, hash)
         select head.base + n, stream.stream, n, now() - interval '3 days',
                jsonb_build_object('version', 1, 'kind', 'event', 'action', 'proxy.connect'), decode(repeat('00', 32), 'hex')
         from head, stream, generate_series(1, 300) as n",
    )?;
    create("second").await?;
    let now = time::OffsetDateTime::now_utc();
    let lately = AuditFilter {
        since: Some(now - time::Duration::hours(1)),
        ..Default::default()
    };
    let found = records(&client, &lately).await?;
    for name in ["first", "second"] {
        ensure!(
            found
                .iter()
                .any(|record| record.body.detail.get("name") == Some(&json!(name))),
            "the record of the {name} call is hidden"
        );
    }
    let before = AuditFilter {
        until: Some(now - time::Duration::days(2)),
        ..Default::default()
    };
    assert_eq!(records(&client, &before).await?.len(), 300);
    Ok(())
}

// part of: ISC-22
#[tokio::test]
// invariant: audit-trail
async fn a_time_filter_on_a_long_trail_finds_every_record() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let orchestrator = control_plane.orchestrator("", &[]).await?;
    let client = orchestrator.client()?;
    // Four minutes apart, over a fortnight; some written late, as after an outage, and some by a
    // fast clock.
    control_plane.postgres.query(
        "with head as (update audit_head set last = last + 5000 returning last - 5000 as base)
         insert into audit_events (cursor, stream, seq, at, body, hash)
         select head.base + n, '0190a3b0-0000-7000-8000-000000000001', n,
                timestamptz '2026-01-01 00:00:00Z' + n * interval '4 minutes' + case when n % 997 < 60 then interval '-50 minutes' when n % 1009 < 5 then interval '55 minutes' else interval '0' end,
                jsonb_build_object('version', 1, 'kind', 'event', 'action', 'node.seen'), decode(repeat('00', 32), 'hex')
         from head, generate_series(1, 5000) as n",
    )?;
    let time = |text: &str| {
        time::OffsetDateTime::parse(text, &time::format_description::well_known::Rfc3339)
    };
    for (since, until) in [
        (Some("2026-01-03T07:00:00Z"), Some("2026-01-03T09:00:00Z")),
        (Some("2026-01-14T20:00:00Z"), None),
        (None, Some("2026-01-01T03:30:00Z")),
        (Some("2026-01-03T17:30:00Z"), Some("2026-01-04T03:00:00Z")),
        (Some("2025-01-01T00:00:00Z"), Some("2025-06-01T00:00:00Z")),
        (Some("2027-06-01T00:00:00Z"), None),
        (Some("0001-01-01T00:00:00Z"), Some("9999-12-31T23:59:59Z")),
    ] {
        let filter = AuditFilter {
            since: since.map(time).transpose()?,
            until: until.map(time).transpose()?,
            action: Some("node.seen".to_owned()),
            ..Default::default()
        };
        let found: Vec<i64> = records(&client, &filter)
            .await?
            .iter()
            .map(|record| record.cursor)
            .collect();
        let (since, until) = (since.unwrap_or("-infinity"), until.unwrap_or("infinity"));
        let expected = control_plane.postgres.query(&format!(
            "select cursor from audit_events where action = 'node.seen' and at >= \
             '{since}' and at < '{until}' order by cursor"
        ))?;
        let expected = expected
            .lines()
            .map(str::parse)
            .collect::<Result<Vec<i64>, _>>()?;
        assert_eq!(found, expected, "{since} {until}");
    }
    // A record with a time far off hides none of the others.
    control_plane.postgres.query(
        "insert into audit_events (cursor, stream, seq, at, body, hash) select 4000000000000000000, '0190a3b0-0000-7000-8000-000000000002', 1, '2000-01-01',
                jsonb_build_object('version', 1, 'kind', 'event', 'action', 'node.far'), decode(repeat('00', 32), 'hex')",
    )?;
    let filter = AuditFilter {
        since: Some(time("2026-01-14T20:00:00Z")?),
        action: Some("node.seen".to_owned()),
        ..Default::default()
    };
    ensure!(
        !records(&client, &filter).await?.is_empty(),
        "the records are gone"
    );
    control_plane
        .postgres
        .query("delete from audit_events where cursor = 4000000000000000000")?;
    // By the id of a user or a token, as by name.
    client
        .create_task(&TaskCreate {
            name: "mine".to_owned(),
            ..Default::default()
        })
        .await?;
    let of_me = records(
        &client,
        &AuditFilter {
            action: Some("task.create".to_owned()),
            ..Default::default()
        },
    )
    .await?;
    assert_eq!(of_me.len(), 2);
    let subject = of_me
        .first()
        .and_then(|record| record.body.subject.clone())
        .context("somebody")?;
    for id in [
        subject.user_id.map(|id| id.to_string()),
        subject.token_id.map(|id| id.to_string()),
    ] {
        let found = records(
            &client,
            &AuditFilter {
                subject: id.clone(),
                ..Default::default()
            },
        )
        .await?;
        ensure!(
            of_me.iter().all(|record| found.contains(record))
                && found.iter().all(|record| record.body.subject.is_some()),
            "{id:?}"
        );
    }
    let nobody = records(
        &client,
        &AuditFilter {
            subject: Some(uuid::Uuid::now_v7().to_string()),
            ..Default::default()
        },
    )
    .await?;
    assert_eq!(nobody.len(), 0);
    Ok(())
}
