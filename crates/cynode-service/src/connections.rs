//! Fair shares of a listener's connections.
//!
//! All clients share one limit of connections, so a client that opens many could lock out the
//! others. Each connection therefore counts against a share: first the unauthenticated share, and
//! from its first valid token on its caller's.
//!
//! Invariants: a new connection always gets in, because a full unauthenticated share closes the
//! connection that has waited longest for its client; no caller exceeds its share; nodes and
//! administrators have reserved connections. None of this ever cuts off an authenticated call in
//! flight.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use cynode_api::ErrorCode;
use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};
use uuid::Uuid;

use crate::ApiError;

/// A connection that has been idle for less than this is not closed for a new one: its head may be
/// in flight. New connections queue meanwhile.
const IDLE_GRACE: Duration = Duration::from_millis(50);
/// If the server is processing requests on all unauthenticated connections, the oldest is closed
/// after this time.
const PROCESSING_GRACE: Duration = Duration::from_secs(1);
/// Unauthenticated bodies that are read concurrently; beyond that, the connection that has waited
/// longest for its client is closed.
const MAX_UNAUTHENTICATED_BODIES: usize = 64;
/// A share is the number of all connections divided by one of these: the unauthenticated share, the
/// connections reserved for nodes and administrators, the share of a caller, and that of an agent
/// token.
const UNAUTHENTICATED_DIVISOR: usize = 4;
const RESERVED_DIVISOR: usize = 16;
const CALLER_DIVISOR: usize = 8;
const TOKEN_DIVISOR: usize = 16;

/// The owner of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CallerId {
    /// On a worker: the holder of its token. An orchestrator forwards all callers, so it may use
    /// all authenticated connections.
    Orchestrator,
    Node(Uuid),
    Administrator(Uuid),
    User(Uuid),
    /// All agents and sandboxes of a user share one limit, and each token has half of it.
    Agent {
        user: Uuid,
        token: Uuid,
    },
}

impl CallerId {
    /// The key of the share: the same for all agents of a user.
    #[must_use]
    pub const fn share(self) -> Self {
        match self {
            Self::Agent { user, .. } => Self::Agent {
                user,
                token: Uuid::nil(),
            },
            other => other,
        }
    }

    const fn token(self) -> Option<Uuid> {
        match self {
            Self::Agent { token, .. } => Some(token),
            _ => None,
        }
    }

    const fn is_privileged(self) -> bool {
        matches!(
            self,
            Self::Orchestrator | Self::Node(_) | Self::Administrator(_)
        )
    }
}

/// Counts the connection of a request against its caller's share. A request without a connection (a
/// tool's) does not count.
pub fn assign_to_caller(extensions: &http::Extensions, caller: CallerId) -> Result<(), ApiError> {
    extensions
        .get::<Connection>()
        .map_or(Ok(()), |connection| connection.assign_to(caller))
}

/// The division of a listener's connections into shares.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capacity {
    pub(crate) connections: usize,
}

impl Capacity {
    fn share(self, divisor: usize) -> usize {
        (self.connections / divisor).max(1)
    }

    pub(crate) fn unauthenticated(self) -> usize {
        self.share(UNAUTHENTICATED_DIVISOR)
    }

    fn authenticated(self) -> usize {
        self.connections
            .saturating_sub(self.unauthenticated())
            .max(2)
    }

    /// Connections for users and agents; the rest is reserved for nodes and administrators.
    fn ordinary(self) -> usize {
        self.authenticated() - self.share(RESERVED_DIVISOR)
    }

    fn of_caller(self, caller: CallerId) -> usize {
        if caller == CallerId::Orchestrator {
            self.authenticated()
        } else {
            self.share(CALLER_DIVISOR)
        }
    }

    fn of_token(self) -> usize {
        self.share(TOKEN_DIVISOR)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Between requests, in the middle of a head, or in a handshake.
    Head,
    /// Waiting for the body of an unauthenticated request.
    Body,
    /// Waiting for the client to read the response to an unauthenticated request.
    Answer,
    /// The server processes a request, or the connection was upgraded.
    Processing,
}

#[derive(Debug)]
struct Member {
    id: u64,
    phase: Phase,
    since: Instant,
    token: Option<Uuid>,
    closer: Arc<Closer>,
}

/// Tells the task of a connection to close it. The task first handles what has arrived: if that is
/// a complete request, the connection rejoins the share.
#[derive(Debug, Default)]
struct Closer {
    is_closing: AtomicBool,
    wake: Notify,
}

impl Closer {
    fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
        self.wake.notify_one();
    }
}

/// The members of one share, ordered by when they entered their phase.
#[derive(Debug, Default)]
struct Pool(BTreeMap<u64, Member>);

impl Pool {
    fn first(&self, fits: impl Fn(&Member) -> bool) -> Option<(u64, Instant)> {
        self.0
            .values()
            .find(|member| fits(member))
            .map(|member| (member.id, member.since))
    }
}

#[derive(Debug, Default)]
struct Table {
    last_seq: u64,
    /// The share of a connection (none for the unauthenticated), and its position there.
    places: HashMap<u64, (Option<CallerId>, u64)>,
    unauthenticated: Pool,
    callers: HashMap<CallerId, Pool>,
    /// Authenticated connections: all, and those of users and agents.
    authenticated: usize,
    ordinary: usize,
}

impl Table {
    fn next_seq(&mut self) -> u64 {
        self.last_seq += 1;
        self.last_seq
    }

    fn pool(&mut self, share: Option<CallerId>) -> &mut Pool {
        match share {
            None => &mut self.unauthenticated,
            Some(caller) => self.callers.entry(caller).or_default(),
        }
    }

    fn put(&mut self, share: Option<CallerId>, member: Member) {
        let seq = self.next_seq();
        self.places.insert(member.id, (share, seq));
        if let Some(caller) = share {
            self.authenticated += 1;
            self.ordinary += usize::from(!caller.is_privileged());
        }
        self.pool(share).0.insert(seq, member);
    }

    fn take(&mut self, id: u64) -> Option<Member> {
        let (share, seq) = self.places.remove(&id)?;
        let member = self.pool(share).0.remove(&seq);
        if let Some(caller) = share {
            self.authenticated -= 1;
            self.ordinary -= usize::from(!caller.is_privileged());
            if self
                .callers
                .get(&caller)
                .is_some_and(|pool| pool.0.is_empty())
            {
                self.callers.remove(&caller);
            }
        }
        member
    }

    fn close(&mut self, id: u64, share: &'static str) {
        if let Some(member) = self.take(id) {
            metrics::counter!("cynode_connections_closed_for_others_total", "share" => share)
                .increment(1);
            member.closer.close();
        }
    }

    fn set_phase(&mut self, id: u64, phase: Phase) {
        let Some((share, seq)) = self.places.get(&id).copied() else {
            return;
        };
        let next = self.next_seq();
        let pool = self.pool(share);
        if let Some(member) = pool.0.remove(&seq) {
            pool.0.insert(
                next,
                Member {
                    phase,
                    since: Instant::now(),
                    ..member
                },
            );
            self.places.insert(id, (share, next));
        }
    }

    /// Closes an idle connection of a caller, and returns whether there was one.
    fn close_idle(&mut self, share: CallerId, token: Option<Uuid>) -> bool {
        let idle = |member: &Member| {
            member.phase == Phase::Head && (token.is_none() || member.token == token)
        };
        let found = self.callers.get(&share).and_then(|pool| pool.first(idle));
        found.inspect(|(id, _)| self.close(*id, "caller")).is_some()
    }

    /// Closes an idle connection of the caller with the most, if it has more than `more_than`.
    /// Returns whether there was one.
    fn close_idle_of_largest(&mut self, more_than: usize, fits: impl Fn(CallerId) -> bool) -> bool {
        let has_idle = |pool: &Pool| pool.first(|member| member.phase == Phase::Head).is_some();
        let largest = self
            .callers
            .iter()
            .filter(|(caller, pool)| fits(**caller) && pool.0.len() > more_than && has_idle(pool));
        let largest = largest
            .max_by_key(|(_, pool)| pool.0.len())
            .map(|(caller, _)| *caller);
        largest.is_some_and(|caller| self.close_idle(caller, None))
    }
}

#[derive(Debug)]
pub(crate) struct Shares {
    capacity: Capacity,
    idle_grace: Duration,
    processing_grace: Duration,
    table: Mutex<Table>,
    /// Signals a free place in the unauthenticated share.
    freed: Notify,
}

impl Shares {
    pub(crate) fn new(capacity: Capacity) -> Arc<Self> {
        Self::with(capacity, IDLE_GRACE, PROCESSING_GRACE)
    }

    fn with(capacity: Capacity, idle_grace: Duration, processing_grace: Duration) -> Arc<Self> {
        Arc::new(Self {
            capacity,
            idle_grace,
            processing_grace,
            table: Mutex::default(),
            freed: Notify::new(),
        })
    }

    /// Waits until a new connection can be accepted, and closes another one if necessary.
    pub(crate) async fn make_room(&self) {
        loop {
            let wait = {
                let mut table = self.table.lock();
                if table.unauthenticated.0.len() < self.capacity.unauthenticated() {
                    return;
                }
                let waiting_for_client = table
                    .unauthenticated
                    .first(|member| member.phase != Phase::Processing)
                    .map(|(id, since)| (id, since, self.idle_grace));
                let oldest = waiting_for_client.or_else(|| {
                    table
                        .unauthenticated
                        .first(|_| true)
                        .map(|(id, since)| (id, since, self.processing_grace))
                });
                let Some((id, since, grace)) = oldest else {
                    return;
                };
                let left = grace.saturating_sub(since.elapsed());
                if left.is_zero() {
                    table.close(id, "unauthenticated");
                    continue;
                }
                left
            };
            let _either = tokio::time::timeout(wait, self.freed.notified()).await;
        }
    }

    /// Closes the connection that has waited longest for its client, without the grace period: the
    /// process is out of descriptors. Returns whether there was one.
    pub(crate) fn close_oldest(&self) -> bool {
        let mut table = self.table.lock();
        let oldest = table
            .unauthenticated
            .first(|member| member.phase != Phase::Processing);
        let closed = oldest
            .inspect(|(id, _)| table.close(*id, "unauthenticated"))
            .is_some();
        closed || table.close_idle_of_largest(0, |_| true)
    }

    pub(crate) fn admit(shares: &Arc<Self>) -> Place {
        let closer = Arc::<Closer>::default();
        let mut table = shares.table.lock();
        let id = table.next_seq();
        table.put(
            None,
            Member {
                id,
                phase: Phase::Head,
                since: Instant::now(),
                token: None,
                closer: Arc::clone(&closer),
            },
        );
        Place(Connection(Arc::new(Inner {
            id,
            shares: Arc::clone(shares),
            closer,
            requests: AtomicU64::new(0),
            is_authenticated: AtomicBool::new(false),
            is_processing: AtomicBool::new(false),
            is_upgraded: AtomicBool::new(false),
            streams: AtomicBool::new(false),
        })))
    }

    /// Makes room for one more connection of a caller, if necessary by closing an idle one. Returns
    /// false if its share is full of requests in flight.
    fn try_make_room(&self, table: &mut Table, caller: CallerId) -> bool {
        let share = caller.share();
        let members = |table: &Table| table.callers.get(&share).map_or(0, |pool| pool.0.len());
        if let Some(token) = caller.token() {
            let of_token = table.callers.get(&share).map_or(0, |pool| {
                pool.0
                    .values()
                    .filter(|member| member.token == Some(token))
                    .count()
            });
            if of_token >= self.capacity.of_token() && !table.close_idle(share, Some(token)) {
                return false;
            }
        }
        if members(table) >= self.capacity.of_caller(caller) && !table.close_idle(share, None) {
            return false;
        }
        let full = |table: &Table| {
            table.authenticated >= self.capacity.authenticated()
                || !caller.is_privileged() && table.ordinary >= self.capacity.ordinary()
        };
        if !full(table) {
            return true;
        }
        let own = members(table);
        if caller.is_privileged() {
            return table.close_idle_of_largest(0, |other| !other.is_privileged())
                || table.close_idle_of_largest(own, |_| true);
        }
        table.close_idle_of_largest(own, |other| !other.is_privileged())
    }
}

/// A connection's place in its share, freed on drop.
#[derive(Debug)]
pub(crate) struct Place(Connection);

impl Place {
    pub(crate) const fn connection(&self) -> &Connection {
        &self.0
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let inner = &self.0.0;
        drop(inner.shares.table.lock().take(inner.id));
        inner.shares.freed.notify_one();
    }
}

/// The connection of a request, in the request's extensions.
#[derive(Clone, Debug)]
pub struct Connection(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    id: u64,
    shares: Arc<Shares>,
    closer: Arc<Closer>,
    /// Counts requests and the handshake, to tell one head from the next.
    requests: AtomicU64,
    is_authenticated: AtomicBool,
    is_processing: AtomicBool,
    is_upgraded: AtomicBool,
    /// Whether the current response is an open-ended stream.
    streams: AtomicBool,
}

impl Connection {
    /// Moves this connection to its caller's share. Fails if requests in flight fill the share.
    pub fn assign_to(&self, caller: CallerId) -> Result<(), ApiError> {
        let inner = &self.0;
        let share = caller.share();
        let mut table = inner.shares.table.lock();
        self.rejoin(&mut table);
        let Some((present, seq)) = table.places.get(&inner.id).copied() else {
            return Ok(());
        };
        if present == Some(share)
            && table
                .pool(present)
                .0
                .get(&seq)
                .is_some_and(|member| member.token == caller.token())
        {
            return Ok(());
        }
        let Some(member) = table.take(inner.id) else {
            return Ok(());
        };
        let has_room = inner.shares.try_make_room(&mut table, caller);
        let (share, token) = if has_room {
            (Some(share), caller.token())
        } else {
            (None, None)
        };
        table.put(share, Member { token, ..member });
        drop(table);
        inner.is_authenticated.store(has_room, Ordering::Relaxed);
        inner.shares.freed.notify_one();
        if has_room {
            return Ok(());
        }
        metrics::counter!("cynode_connections_refused_total").increment(1);
        Err(ApiError::new(
            ErrorCode::TooManyRequests,
            "all connections of this caller are in use",
        ))
    }

    /// Moves this connection back to the unauthenticated share, after its token turned out to be
    /// invalid.
    pub fn move_to_unauthenticated(&self) {
        let inner = &self.0;
        let mut table = inner.shares.table.lock();
        if let Some(member) = table.take(inner.id) {
            table.put(
                None,
                Member {
                    token: None,
                    ..member
                },
            );
        }
        inner.is_authenticated.store(false, Ordering::Relaxed);
    }

    pub(crate) fn is_authenticated(&self) -> bool {
        self.0.is_authenticated.load(Ordering::Relaxed)
    }

    /// Marks the arrival of a complete head.
    pub(crate) fn begin(&self) {
        self.0.is_processing.store(true, Ordering::Relaxed);
        self.rejoin(&mut self.0.shares.table.lock());
        self.set_phase(Phase::Processing);
    }

    /// Rejoins the share if the connection was about to be closed: the request arrived first.
    fn rejoin(&self, table: &mut Table) {
        let inner = &self.0;
        if inner.closer.is_closing.swap(false, Ordering::Relaxed) {
            table.put(
                None,
                Member {
                    id: inner.id,
                    phase: Phase::Processing,
                    since: Instant::now(),
                    token: None,
                    closer: Arc::clone(&inner.closer),
                },
            );
            inner.is_authenticated.store(false, Ordering::Relaxed);
        }
    }

    /// Marks the response as sent.
    pub(crate) fn finish(&self) {
        if self.0.is_upgraded.load(Ordering::Relaxed) {
            return;
        }
        self.next_head();
        self.set_phase(Phase::Head);
    }

    /// Marks the end of a head or handshake: bytes read from here on belong to the next head.
    pub(crate) fn next_head(&self) {
        self.0.requests.fetch_add(1, Ordering::Relaxed);
        self.0.is_processing.store(false, Ordering::Relaxed);
    }

    /// The number of the head being read, if any.
    pub(crate) fn head(&self) -> Option<u64> {
        (!self.0.is_processing.load(Ordering::Relaxed))
            .then(|| self.0.requests.load(Ordering::Relaxed))
    }

    pub(crate) fn requests(&self) -> u64 {
        self.0.requests.load(Ordering::Relaxed)
    }

    /// Marks the connection as no longer HTTP: it keeps its place until it is closed.
    pub(crate) fn mark_upgraded(&self) {
        self.0.is_upgraded.store(true, Ordering::Relaxed);
        self.set_streams(true);
    }

    pub(crate) fn set_streams(&self, streams: bool) {
        self.0.streams.store(streams, Ordering::Relaxed);
    }

    pub(crate) fn streams(&self) -> bool {
        self.0.streams.load(Ordering::Relaxed)
    }

    /// Marks an unauthenticated connection as waiting for the body of its request.
    pub(crate) fn mark_waiting_for_body(&self) {
        if self.is_authenticated() {
            return;
        }
        self.set_phase(Phase::Body);
        let mut table = self.0.shares.table.lock();
        let bodies = table
            .unauthenticated
            .0
            .values()
            .filter(|member| member.phase == Phase::Body)
            .count();
        if bodies > MAX_UNAUTHENTICATED_BODIES
            && let Some((id, _)) = table
                .unauthenticated
                .first(|member| member.phase == Phase::Body)
        {
            table.close(id, "unauthenticated");
        }
    }

    /// Marks the end of the body of an unauthenticated request: the server processes it.
    pub(crate) fn mark_body_ended(&self) {
        if !self.is_authenticated() {
            self.set_phase(Phase::Processing);
        }
    }

    /// Marks an unauthenticated connection as waiting for its client to read the response.
    pub(crate) fn mark_waiting_for_reader(&self) {
        if !self.is_authenticated() && !self.0.is_upgraded.load(Ordering::Relaxed) {
            self.set_phase(Phase::Answer);
        }
    }

    /// Resolves when the connection must be closed for another.
    pub(crate) async fn close_requested(&self) {
        while !self.0.closer.is_closing.load(Ordering::Relaxed) {
            self.0.closer.wake.notified().await;
        }
    }

    fn set_phase(&self, phase: Phase) {
        self.0.shares.table.lock().set_phase(self.0.id, phase);
        if phase != Phase::Processing {
            self.0.shares.freed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(number: u128) -> CallerId {
        CallerId::User(Uuid::from_u128(number))
    }

    fn agent(user: u128, token: u128) -> CallerId {
        CallerId::Agent {
            user: Uuid::from_u128(user),
            token: Uuid::from_u128(token),
        }
    }

    fn is_closed(place: &Place) -> bool {
        place.0.0.closer.is_closing.load(Ordering::Relaxed)
    }

    /// Connections of a caller, each with a request in flight or idle.
    fn connections_of(
        shares: &Arc<Shares>,
        caller: CallerId,
        number: usize,
        in_flight: bool,
    ) -> Vec<Place> {
        let connect = |_| {
            let place = Shares::admit(shares);
            place.0.begin();
            place.0.assign_to(caller).expect("there is room");
            if !in_flight {
                place.0.finish();
            }
            place
        };
        (0..number).map(connect).collect()
    }

    fn is_refused(shares: &Arc<Shares>, caller: CallerId) -> bool {
        let place = Shares::admit(shares);
        place.0.begin();
        place
            .0
            .assign_to(caller)
            .is_err_and(|error| error.is(ErrorCode::TooManyRequests) && error.status == 429)
    }

    async fn new_connection_must_wait(shares: &Shares) -> bool {
        tokio::time::timeout(Duration::from_millis(20), shares.make_room())
            .await
            .is_err()
    }

    const NEVER: Duration = Duration::from_secs(3_600);

    #[tokio::test]
    // invariant: no-starvation
    async fn a_full_unauthenticated_share_closes_the_connection_waiting_longest_for_its_client() {
        // 16 connections: four for the unauthenticated.
        let shares = Shares::with(Capacity { connections: 16 }, Duration::ZERO, NEVER);
        let mut places = Vec::new();
        for number in 0..4 {
            assert!(
                !new_connection_must_wait(&shares).await,
                "connection {number} had to wait"
            );
            places.push(Shares::admit(&shares));
        }
        // The first is in flight, the second has since been answered: the third has waited longest
        // for its client.
        places[0].0.begin();
        places[1].0.begin();
        places[1].0.finish();
        assert!(!new_connection_must_wait(&shares).await);
        assert_eq!(
            places.iter().map(is_closed).collect::<Vec<_>>(),
            [false, false, true, false]
        );
        places.push(Shares::admit(&shares));
        // A connection with an unread response or a missing body waits for its client too.
        places[3].0.begin();
        places[1].0.begin();
        places[1].0.mark_waiting_for_body();
        places[3].0.mark_waiting_for_reader();
        for expected in [4, 1, 3] {
            assert!(!new_connection_must_wait(&shares).await);
            assert!(is_closed(&places[expected]), "{expected}");
            let place = Shares::admit(&shares);
            place.0.begin();
            places.push(place);
        }
        // Now all are in flight, and none is closed.
        assert!(new_connection_must_wait(&shares).await && !is_closed(&places[0]));
    }

    #[tokio::test]
    async fn an_unauthenticated_share_full_of_slow_requests_closes_the_oldest() {
        let shares = Shares::with(Capacity { connections: 8 }, NEVER, Duration::ZERO);
        let places = [Shares::admit(&shares), Shares::admit(&shares)];
        assert!(
            new_connection_must_wait(&shares).await,
            "closed a connection that may still send its head"
        );
        for place in &places {
            place.0.begin();
        }
        assert!(!new_connection_must_wait(&shares).await);
        assert!(is_closed(&places[0]) && !is_closed(&places[1]));
    }

    #[tokio::test]
    async fn a_request_that_arrives_before_its_connection_is_closed_is_served() {
        let shares = Shares::with(Capacity { connections: 8 }, Duration::ZERO, NEVER);
        let places = [Shares::admit(&shares), Shares::admit(&shares)];
        assert!(!new_connection_must_wait(&shares).await && is_closed(&places[0]));
        places[0].0.begin();
        assert!(
            !is_closed(&places[0])
                && tokio::time::timeout(Duration::from_millis(20), places[0].0.close_requested())
                    .await
                    .is_err()
        );
        // The first connection has rejoined, so the next new connection closes the second.
        assert!(!new_connection_must_wait(&shares).await && is_closed(&places[1]));
        assert!(
            tokio::time::timeout(NEVER, places[1].0.close_requested())
                .await
                .is_ok()
        );
        places[1].0.assign_to(user(1)).expect("there is room");
        assert!(!is_closed(&places[1]) && places[1].0.is_authenticated());
    }

    #[tokio::test]
    async fn a_new_connection_waits_for_a_place_that_becomes_free() {
        let shares = Shares::with(Capacity { connections: 4 }, NEVER, NEVER);
        let first = Shares::admit(&shares);
        first.0.begin();
        let waiting = tokio::spawn({
            let shares = Arc::clone(&shares);
            async move { shares.make_room().await }
        });
        assert!(new_connection_must_wait(&shares).await && !waiting.is_finished());
        first.0.assign_to(user(1)).expect("there is room");
        waiting.await.expect("it got in");
        assert!(!is_closed(&first));
    }

    #[tokio::test]
    // invariant: no-starvation
    async fn a_full_share_closes_only_idle_connections() {
        // 32 connections: four for a caller, two for a token.
        let shares = Shares::new(Capacity { connections: 32 });
        let busy = connections_of(&shares, user(1), 3, true);
        let idle = connections_of(&shares, user(1), 1, false);
        let fifth = connections_of(&shares, user(1), 1, true);
        assert!(is_closed(&idle[0]) && !busy.iter().chain(&fifth).any(is_closed));
        assert!(is_refused(&shares, user(1)));
        assert!(!is_refused(&shares, user(2)));
        // Agents have a share apart from their user's, and one token has half of it.
        let one = connections_of(&shares, agent(1, 1), 2, true);
        assert!(is_refused(&shares, agent(1, 1)) && !is_refused(&shares, agent(1, 2)));
        let two = connections_of(&shares, agent(1, 2), 2, true);
        assert!(is_refused(&shares, agent(1, 3)));
        drop((one, two));
        assert!(!is_refused(&shares, agent(1, 1)));
        drop(busy);
        assert!(!is_refused(&shares, user(1)));
    }

    #[tokio::test]
    // invariant: no-starvation
    async fn nodes_and_administrators_get_in_when_users_have_taken_all_the_rest() {
        // 64 connections: 48 for the authenticated, four of them for nodes and administrators,
        // eight for each caller.
        let shares = Shares::new(Capacity { connections: 64 });
        let crowd: Vec<_> = (0..44)
            .flat_map(|number| connections_of(&shares, user(number / 8), 1, true))
            .collect();
        assert!(is_refused(&shares, user(100)));
        let privileged = [
            CallerId::Administrator(Uuid::from_u128(1)),
            CallerId::Node(Uuid::from_u128(2)),
        ];
        let first: Vec<_> = privileged
            .iter()
            .flat_map(|caller| connections_of(&shares, *caller, 2, true))
            .collect();
        assert!(
            is_refused(&shares, privileged[0]),
            "an administrator got in although the reserved places are full"
        );
        assert!(!crowd.iter().chain(&first).any(is_closed));
        // A caller with many idle connections loses one to a caller with few.
        crowd[0].0.finish();
        assert!(!is_refused(&shares, user(100)));
        assert!(is_closed(&crowd[0]));
        drop(first);
        assert!(!is_refused(&shares, CallerId::Orchestrator));
    }

    #[tokio::test]
    async fn a_connection_counts_against_the_caller_of_its_last_valid_token() {
        let shares = Shares::new(Capacity { connections: 32 });
        let places = connections_of(&shares, user(1), 4, true);
        places[0].0.assign_to(user(2)).expect("there is room");
        assert!(!is_refused(&shares, user(1)));
        places[1].0.move_to_unauthenticated();
        assert!(!places[1].0.is_authenticated() && places[0].0.is_authenticated());
        assert_eq!(shares.table.lock().unauthenticated.0.len(), 1);
        drop(places);
        let table = shares.table.lock();
        assert!(
            table.places.is_empty()
                && table.callers.is_empty()
                && table.authenticated == 0
                && table.ordinary == 0
        );
    }

    #[tokio::test]
    async fn too_many_unauthenticated_bodies_close_the_connection_waiting_longest() {
        let shares = Shares::new(Capacity { connections: 4_096 });
        let places: Vec<_> = (0..=MAX_UNAUTHENTICATED_BODIES)
            .map(|_| Shares::admit(&shares))
            .collect();
        for place in &places {
            place.0.begin();
            assert!(!is_closed(&places[0]));
            place.0.mark_waiting_for_body();
        }
        assert_eq!(places.iter().filter(|place| is_closed(place)).count(), 1);
        assert!(is_closed(&places[0]));
    }

    #[tokio::test]
    async fn an_upgraded_connection_counts_until_it_is_closed() {
        let shares = Shares::new(Capacity { connections: 8 });
        let place = connections_of(&shares, user(1), 1, true)
            .pop()
            .expect("one");
        place.0.mark_upgraded();
        place.0.finish();
        assert!(is_refused(&shares, user(1)) && !is_closed(&place));
        drop(place);
        assert!(!is_refused(&shares, user(1)));
    }
}
