//! `audit export`: prints records, with the signed checkpoints on request.

use std::{
    io::{self, BufWriter, Write},
    process::ExitCode,
};

use cynode_api::AuditRecord;
use cynode_audit::ocsf;
use cynode_client::UserClient;
use serde_json::{Value, json};

use crate::{
    cli::{AuditExport, ExportFormat},
    commands::CommandResult,
    failure::Failure,
    output::{self, Progress},
    sanitize,
};

pub async fn run(client: &UserClient, args: &AuditExport) -> CommandResult {
    if args.proof && args.format != ExportFormat::Jsonl {
        return Err(
            Failure::usage("--proof needs records as stored").remedy("Omit --format or --proof.")
        );
    }
    let progress = Progress::start("exporting");
    let mut out = BufWriter::with_capacity(256 * 1024, io::stdout());
    if args.proof {
        // Read the checkpoints first: they must not cover records that the export lacks.
        let checkpoints = client.audit_checkpoints().await?;
        for line in checkpoints.items {
            writeln!(
                out,
                "{}",
                sanitize::json(json!({ "checkpoint": line }).to_string())
            )?;
        }
        output::message(&sanitize::line(&format!(
            "verify the file with 'cynode audit verify --file FILE --key {}'",
            checkpoints.key
        )));
    }
    let filter = super::filter(client, &args.filter).await?;
    let (mut after, mut count) = (Some(0), 0_u64);
    while let Some(page) = super::next_page(client, &mut after, &filter).await? {
        for record in page.items {
            writeln!(
                out,
                "{}",
                sanitize::json(convert(record, args.format)?.to_string())
            )?;
            count += 1;
        }
        progress.set_message(format!("exporting: {count} records"));
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn convert(record: Value, format: ExportFormat) -> Result<Value, Failure> {
    match format {
        ExportFormat::Jsonl => Ok(record),
        ExportFormat::Ocsf => {
            let record: AuditRecord = serde_json::from_value(record)
                .map_err(|error| Failure::internal(format!("a record can't be read: {error}")))?;
            Ok(ocsf(&record))
        }
    }
}
