"""What a budget costs in quality: tasks, the runner that shares one prefill among methods, tables and figures."""
