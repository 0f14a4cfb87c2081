-- Whoever looks for one user among millions of records does not read them all.
create index on audit_events (subject, cursor) where subject is not null;
-- Nor for what is rare. Commands are most of what there is, and found without.
create index on audit_events (action, cursor) where action <> 'session.exec';
