//! Requests of a kernel that does not respond otherwise: the magic SysRq over the serial console.

use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::AsyncWriteExt;
use tokio::net::unix::OwnedWriteHalf;

use super::console::Console;
use super::monitor::Monitor;

/// A break on the serial console. The kernel takes the next character as a SysRq.
const BREAK: &[u8] = b"{\"execute\": \"chardev-send-break\", \"arguments\": {\"id\": \"console\"}}\n";

/// The requests, each with the line that the kernel prints first: the stacks of the processors, and of the tasks that are blocked.
/// The last one prints only that line, so all output of the others precedes it.
const REQUESTS: [(u8, &str); 3] =
    [(b'l', "sysrq: Show backtrace"), (b'w', "sysrq: Show Blocked State"), (b'h', "sysrq: HELP")];

/// The time for one request. A kernel that does not handle interrupts prints nothing.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Makes the kernel print to its console what its processors do, and which tasks are blocked.
pub(super) async fn show_state(
    monitor: &mut Monitor,
    input: &mut OwnedWriteHalf,
    console: &Console,
) -> Result<()> {
    for (request, first_line) in REQUESTS {
        let shown = async {
            monitor.execute(BREAK).await?;
            input.write_all(&[request]).await?;
            anyhow::ensure!(console.shows(first_line).await, "QEMU has ended");
            Ok(())
        };
        let shown = tokio::time::timeout(TIMEOUT, shown).await;
        shown.with_context(|| format!("the kernel did not print {first_line:?} within {TIMEOUT:?}"))??;
    }
    Ok(())
}
