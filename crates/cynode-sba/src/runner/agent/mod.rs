//! The agent loop: works a job without steps on a model that the job allows.
//!
//! The loop asks the model, carries out the tools that it calls, and tells it what came of them,
//! until the model has finished and the job's checks agree, or until a bound is reached. Tools that
//! touch the sandbox are steps: the same code runs, journals and reports them.
//!
//! Invariants: every prompt begins with the whole context of the job; everything that a model or its
//! server says is hostile, and bounded before it is kept; a job succeeds only if every check that it
//! names has succeeded after the model finished; an earlier runner's steps are never repeated, and
//! one that was in flight ends the job.

pub(crate) mod answer;
mod context;
mod criteria;
mod dialogue;
mod earlier;
pub(crate) mod events;
mod models;
mod server;
mod stall;
mod tools;
mod transcript;
mod window;

use std::fmt::Write as _;

use cynode_api::sba::{CriterionResult, FailureCode, InferenceUsage, limits::MAX_MODEL_BYTES};
use cynode_sba_proto::runner::CONTEXT_TOKENS_VARIABLE;
use serde_json::{Value, json};
use tokio::time::Instant;

use self::{
    answer::{Answer, RequestedCall, TokenCount},
    dialogue::{AnsweredCall, Dialogue, Turn},
    models::Models,
    server::ModelServer,
    stall::{MAX_STALE_TURNS, Stall},
    tools::{Finish, ToolCall},
    transcript::Transcript,
    window::Window,
};
use super::{
    result::bounded_to,
    steps::{Effect, Ending, Task, Work},
};

/// Where models are served without a node.
const DEFAULT_URL: &str = "http://localhost:11434";
/// Answers of the model in one job.
const MAX_TURNS: u64 = 200;
/// Prompts and answers of one job, in tokens.
const MAX_TOKENS: u64 = 5_000_000;
/// Tool calls of one answer that are carried out. With the turns, they bound the steps of a job.
const MAX_CALLS_PER_TURN: usize = 8;
/// Steps of one job.
#[cfg(test)]
pub(super) const MAX_AGENT_STEPS: usize = 200 * MAX_CALLS_PER_TURN;
/// Times that the model may say that it has finished while a check fails.
const MAX_UNMET_FINISHES: u32 = 3;
/// For servers that don't count tokens.
const BYTES_PER_TOKEN: u64 = 4;
const MAX_NAME_BYTES: usize = 64;
/// The todo list in a prompt.
const MAX_TODO_BYTES: usize = 8 * 1024;

/// What is reported of an agent's work, apart from its steps.
#[derive(Debug, Default)]
pub(super) struct AgentRecord {
    pub(super) transcript: Transcript,
    pub(super) criteria: Vec<CriterionResult>,
    pub(super) usage: Option<InferenceUsage>,
}

impl Work {
    /// Works the job until it ends, and records how.
    pub(super) async fn run_agent(&self) -> Ending {
        let ending = match self.in_flight {
            Some(index) => {
                let index = usize::try_from(index).unwrap_or(usize::MAX);
                self.interrupted(index, Task::Unknown)
            }
            None => self.work_with_model().await,
        };
        let mut entry = json!({"type": "end", "status": "success"});
        if let Ending::Failure { code, message } = &ending {
            entry["status"] = "failure".into();
            entry["code"] = code.as_str().into();
            entry["message"] = bounded_to(message, MAX_TODO_BYTES).into();
        }
        self.agent.borrow_mut().transcript.end(entry);
        ending
    }

    async fn work_with_model(&self) -> Ending {
        let Some(inference) = &self.job.inference else {
            return unavailable("the job has neither steps nor inference");
        };
        let server = match self.model_server() {
            Ok(server) => server,
            Err(reason) => return unavailable(&reason),
        };
        let models = match self.unless_over(Models::find(inference, server)).await {
            Ok(Ok(models)) => models,
            Ok(Err(reason)) => return unavailable(&reason),
            Err(ending) => return ending,
        };
        let window = Window::new(self.context_tokens(), models.context_tokens());
        let ending = match AgentLoop::new(self, models, window) {
            Ok(agent) => agent.run().await,
            Err(reason) => unavailable(&reason),
        };
        self.check_after(ending).await
    }

    /// The window of the node's models, if its operator states it.
    fn context_tokens(&self) -> Option<u64> {
        let mut environment = self.environment.iter();
        let stated = environment.find(|(name, _)| name == CONTEXT_TOKENS_VARIABLE);
        stated.and_then(|(_, tokens)| tokens.parse().ok())
    }

    /// The node's models, or without a node those at the URL of the environment.
    fn model_server(&self) -> Result<ModelServer, String> {
        if let Some(socket) = &self.node_socket {
            return Ok(ModelServer::of_node(socket));
        }
        let mut environment = self.environment.iter();
        let url = environment.find(|(name, _)| name == "OLLAMA_BASE_URL");
        ModelServer::parse(url.map_or(DEFAULT_URL, |(_, url)| url.as_str()))
    }

    /// Waits for something, unless the job ends first.
    async fn unless_over<T>(&self, wait: impl Future<Output = T>) -> Result<T, Ending> {
        tokio::select! {
            biased;
            reason = self.stopped() => Err(reason.ending()),
            () = tokio::time::sleep_until(self.deadline) => Err(self.out_of_time()),
            result = wait => Ok(result),
        }
    }

    /// Runs the checks of a job that ended without them, so that its result says how far it is.
    async fn check_after(&self, ending: Ending) -> Ending {
        let is_worth_it = match &ending {
            Ending::Failure { code, .. } => {
                *code == FailureCode::TurnLimit
                    || *code == FailureCode::NoProgress
                    || *code == FailureCode::InferenceUnavailable
            }
            Ending::Success => false,
        };
        let has_none = self.agent.borrow().criteria.is_empty();
        let has_steps = !self.results.borrow().is_empty();
        if is_worth_it
            && has_none
            && has_steps
            && self.has_checks()
            && let Ok(verdict) = self.check_criteria(&[]).await
        {
            self.agent.borrow_mut().criteria = verdict.results;
        }
        ending
    }

    fn note(&self, entry: Value) {
        self.agent.borrow_mut().transcript.add(entry);
    }

    /// What is true now: the time left, and the todo list.
    fn state(&self, turn: u64) -> String {
        let mut text = format!(
            "Time left: {} s. Turn {turn} of {MAX_TURNS}.\nTodo list:\n",
            self.progress.remaining_seconds()
        );
        let todo = self.progress.todo.borrow();
        if todo.items().is_empty() {
            text.push_str("(empty)\n");
        }
        let end = text.len() + MAX_TODO_BYTES;
        for item in todo.items() {
            let mark = if item.done { 'x' } else { ' ' };
            let part = item.parent.map(|parent| format!(" (part of {parent})"));
            let part = part.unwrap_or_default();
            // Writing to a string can't fail.
            let _written = writeln!(text, "- [{mark}] {}: {}{part}", item.id, item.title);
            if text.len() > end {
                text.push_str("- …\n");
                break;
            }
        }
        text
    }
}

fn unavailable(reason: &str) -> Ending {
    Ending::failure(FailureCode::InferenceUnavailable, reason)
}

struct AgentLoop<'a> {
    work: &'a Work,
    models: Models,
    window: Window,
    dialogue: Dialogue,
    stall: Stall,
    turn: u64,
    tokens: TokenCount,
    requests: u64,
    asked_for: std::time::Duration,
    unmet_finishes: u32,
    /// For ids of calls: those of servers may be anything.
    calls: u64,
}

/// What a turn leads to.
enum Next {
    Continue,
    End(Ending),
}

impl<'a> AgentLoop<'a> {
    /// Fails if the context of the job does not fit into the window.
    fn new(work: &'a Work, models: Models, window: Window) -> Result<Self, String> {
        let system = context::system_message(&work.job);
        window.check(system.len() + tools::definitions().to_string().len())?;
        let finished = work.results.borrow();
        let earlier = earlier::finished_steps(&finished, window.min_history_bytes());
        work.note(json!({"type": "context", "text": system, "earlier": earlier}));
        Ok(Self {
            work,
            models,
            window,
            dialogue: Dialogue::new(system, earlier, window),
            stall: Stall::default(),
            // Each finished step took at most one.
            turn: finished.len() as u64,
            tokens: TokenCount::default(),
            requests: 0,
            asked_for: std::time::Duration::ZERO,
            unmet_finishes: 0,
            calls: 0,
        })
    }

    async fn run(mut self) -> Ending {
        loop {
            if self.turn >= MAX_TURNS {
                let message = format!("the agent had not finished after {MAX_TURNS} turns");
                return Ending::failure(FailureCode::TurnLimit, message);
            }
            self.turn += 1;
            self.work.progress.begin_turn(self.turn);
            let answer = match self.ask().await {
                Ok(answer) => answer,
                Err(ending) => return ending,
            };
            if self.tokens.total() > MAX_TOKENS {
                let message = format!("the agent's models used more than {MAX_TOKENS} tokens");
                return Ending::failure(FailureCode::TurnLimit, message);
            }
            match self.act(answer).await {
                Next::Continue => {}
                Next::End(ending) => return ending,
            }
            if self.stall.end_turn() {
                let message = format!(
                    "the agent repeated itself, with the same results, for {MAX_STALE_TURNS} turns"
                );
                return Ending::failure(FailureCode::NoProgress, message);
            }
        }
    }

    /// Asks the model for its next answer.
    async fn ask(&mut self) -> Result<Answer, Ending> {
        let messages = self.dialogue.messages(&self.work.state(self.turn));
        let prompt_bytes: usize = messages
            .iter()
            .map(|message| message.to_string().len())
            .sum();
        let request = json!({
            "messages": messages,
            "tools": tools::definitions(),
            "stream": true,
            "stream_options": {"include_usage": true},
            "max_tokens": self.window.answer_tokens(),
        });
        let body = |model: &str| {
            let mut request = request.clone();
            request["model"] = model.into();
            request.to_string().into_bytes()
        };
        let (work, turn) = (self.work, self.turn);
        let mut failures = 0;
        let failed = |model: &str, error: &server::ServerError| {
            failures += 1;
            let message = &error.message;
            work.note(json!({"type": "error", "turn": turn, "model": model, "message": message}));
        };
        let begun = Instant::now();
        let asked = work.unless_over(self.models.ask(body, failed)).await;
        let took = begun.elapsed();
        // Whoever gives up has no request in flight.
        self.requests += failures + u64::from(!matches!(asked, Ok(Err(_))));
        self.asked_for += took;
        if let Ok(Ok(answer)) = &asked {
            let counted = answer.tokens.unwrap_or_else(|| TokenCount {
                prompt: prompt_bytes as u64 / BYTES_PER_TOKEN,
                completion: answer.bytes() as u64 / BYTES_PER_TOKEN,
            });
            self.tokens = TokenCount {
                prompt: self.tokens.prompt.saturating_add(counted.prompt),
                completion: self.tokens.completion.saturating_add(counted.completion),
            };
        }
        self.work.progress.set_tokens(self.tokens.total());
        self.record_usage();
        let answer = asked?.map_err(|reason| {
            unavailable(&format!(
                "no allowed model answered; the last failure is of {reason}"
            ))
        })?;
        let calls = answer.calls.iter();
        self.work.note(json!({
            "type": "answer",
            "turn": self.turn,
            "model": self.models.asked(),
            "text": answer.text,
            "calls": calls
                .map(|call| json!({"name": call.name, "arguments": call.arguments}))
                .collect::<Value>(),
            "prompt_tokens": answer.tokens.map(|tokens| tokens.prompt),
            "completion_tokens": answer.tokens.map(|tokens| tokens.completion),
            "duration_ms": millis(took),
        }));
        Ok(answer)
    }

    fn record_usage(&self) {
        // A result counts to the bound of a signed number.
        let counted = |count: u64| count.min(i64::MAX.unsigned_abs());
        self.work.agent.borrow_mut().usage = Some(InferenceUsage {
            model: bounded_to(self.models.asked(), MAX_MODEL_BYTES),
            requests: self.requests,
            prompt_tokens: counted(self.tokens.prompt),
            completion_tokens: counted(self.tokens.completion),
            duration_ms: millis(self.asked_for),
        });
    }

    /// Does what the model wants.
    async fn act(&mut self, answer: Answer) -> Next {
        if answer.calls.is_empty() {
            return self.act_without_calls(answer).await;
        }
        let mut turn = Turn {
            text: answer.text,
            ..Turn::default()
        };
        for (number, call) in answer.calls.into_iter().enumerate() {
            let (name, arguments, result) = match self.call(number, &call).await {
                Ok(called) => called,
                Err(ending) => return Next::End(ending),
            };
            self.calls += 1;
            let id = format!("call_{}", self.calls);
            self.work.note(json!({
                "type": "result", "turn": self.turn, "name": name, "text": result,
            }));
            turn.calls.push(AnsweredCall {
                id,
                name,
                arguments,
                result,
            });
        }
        self.dialogue.add(turn);
        Next::Continue
    }

    /// A model that calls no tool has finished, unless it said nothing, or not all of it.
    async fn act_without_calls(&mut self, answer: Answer) -> Next {
        let reply = if answer.is_cut {
            "Your answer was cut because it was too long. Continue with a tool call, in smaller \
             pieces, or call finish."
                .to_owned()
        } else if answer.text.trim().is_empty() {
            "You said nothing. Call a tool, or call finish if the job is done.".to_owned()
        } else {
            let finish = Finish {
                summary: answer.text.clone(),
                ..Finish::default()
            };
            match self.finish(&finish).await {
                Ok(reply) => reply,
                Err(ending) => return Next::End(ending),
            }
        };
        self.work
            .note(json!({"type": "message", "turn": self.turn, "text": reply}));
        self.dialogue.add(Turn {
            text: answer.text,
            reply: Some(reply),
            ..Turn::default()
        });
        Next::Continue
    }

    /// Carries out one call; returns its name and arguments as they can be repeated, and what to
    /// tell the model.
    async fn call(
        &mut self,
        number: usize,
        call: &RequestedCall,
    ) -> Result<(String, serde_json::Map<String, Value>, String), Ending> {
        let name = plain_name(&call.name);
        if number >= MAX_CALLS_PER_TURN {
            let refusal = format!(
                "error: not run, because one answer has at most \
                                   {MAX_CALLS_PER_TURN} calls; call it again"
            );
            return Ok((name, serde_json::Map::new(), refusal));
        }
        let arguments = match tools::arguments(&call.arguments) {
            Ok(arguments) => arguments,
            Err(fault) => {
                self.stall.note(&name, &call.arguments, &fault);
                return Ok((name, serde_json::Map::new(), format!("error: {fault}")));
            }
        };
        let result = match ToolCall::read(&call.name, &arguments) {
            Ok(ToolCall::Step(step)) => self.step(Task::Step(&step)).await?,
            Ok(ToolCall::Search(request)) => self.step(Task::Search(&request)).await?,
            Ok(ToolCall::Todo(change)) => {
                let changed = change.apply(&mut self.work.progress.todo.borrow_mut());
                // A list that only changes is no progress.
                return Ok((
                    name,
                    arguments,
                    changed.unwrap_or_else(|fault| format!("error: {fault}")),
                ));
            }
            Ok(ToolCall::Finish(finish)) => self.finish(&finish).await?,
            Err(fault) => format!("error: {fault}"),
        };
        self.stall.note(&name, &call.arguments, &result);
        Ok((name, arguments, result))
    }

    /// Runs a step; returns what the model gets to see of it.
    async fn step(&self, task: Task<'_>) -> Result<String, Ending> {
        let index = self.work.results.borrow().len();
        match self.work.run_task(index, task).await {
            Effect::None | Effect::Failure(_) => {}
            Effect::End(ending) => return Err(ending),
        }
        let results = self.work.results.borrow();
        Ok(results.get(index).map(tools::described).unwrap_or_default())
    }

    /// The model says that it has finished. The job ends if the checks agree; otherwise the model
    /// hears what is missing.
    async fn finish(&mut self, finish: &Finish) -> Result<String, Ending> {
        let verdict = self.work.check_criteria(&finish.criteria).await?;
        let results = verdict.results.clone();
        self.work.note(json!({
            "type": "finish", "turn": self.turn, "summary": finish.summary, "criteria": results,
        }));
        self.work.agent.borrow_mut().criteria = results;
        if verdict.failures.is_empty() {
            return Err(Ending::Success);
        }
        self.unmet_finishes += 1;
        if self.unmet_finishes >= MAX_UNMET_FINISHES {
            return Err(criteria::unmet(&verdict, self.unmet_finishes));
        }
        Ok(format!(
            "You have not finished: these checks fail.\n{}",
            verdict.failures.join("\n")
        ))
    }
}

/// A name that servers accept when they get it back.
fn plain_name(name: &str) -> String {
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "_-".contains(character);
    if !name.is_empty() && name.len() <= MAX_NAME_BYTES && name.chars().all(is_plain) {
        name.to_owned()
    } else {
        "unknown".to_owned()
    }
}

fn millis(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
