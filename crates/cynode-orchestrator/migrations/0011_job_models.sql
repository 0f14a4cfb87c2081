-- The models that the specification of a job allows, for the choice of its node. Null without inference.
alter table jobs add column allowed_models jsonb;
