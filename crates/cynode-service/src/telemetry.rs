//! Logs: to stderr, plain for people or JSON for machines (`CYNODE_LOG_FORMAT=json`), filtered by
//! `CYNODE_LOG`.

use tracing_subscriber::EnvFilter;

pub fn init() {
    let filter = EnvFilter::try_from_env("CYNODE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    // rmcp logs the arguments and results of tools, which must not appear in logs.
    let filter = "rmcp=warn".parse().map_or_else(
        |_| EnvFilter::new("info"),
        |quiet| filter.add_directive(quiet),
    );
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false);
    // The reader of stderr may be gone; reporting that on stderr would panic and take the worker
    // down.
    let builder = builder.log_internal_errors(false);
    let installed = if std::env::var("CYNODE_LOG_FORMAT").is_ok_and(|format| format == "json") {
        builder.json().try_init()
    } else {
        builder
            .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
            .try_init()
    };
    // Fails only if a subscriber is already installed.
    drop(installed);
}

/// An error with all its sources on one line.
pub struct Chain<'a>(pub &'a dyn std::error::Error);

impl std::fmt::Debug for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut source = self.0.source();
        while let Some(error) = source {
            write!(f, ": {error}")?;
            source = error.source();
        }
        Ok(())
    }
}
