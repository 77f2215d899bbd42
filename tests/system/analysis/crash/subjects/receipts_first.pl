# A subject that sends receipts before it writes.
use strict; use warnings; use JSON::PP;
my ($path, $ledgers, @acked, @numbers);
sub say_line { syswrite STDOUT, encode_json($_[0]) . "\n" }
while (my $line = <STDIN>) {
    my $asked = decode_json($line);
    my ($op, $number, $ledger, $entry) = @$asked{qw(op number ledger entry)};
    if ($op eq "start" || $op eq "recover") {
        ($path, $ledgers) = ("$asked->{directory}/acked", $asked->{ledgers});
        if (open my $file, "<", $path) { local $/; @acked = @{ decode_json(<$file>) } }
        say_line($op eq "start" ? {ready => JSON::PP::true} : {acked => \@acked});
        next;
    }
    if ($op eq "report") { say_line({acked => \@acked}); next }
    if ($op eq "persist") {
        say_line({durable => [splice @numbers]});
        open my $file, ">", "$path.new" or die "$path.new: $!";
        print $file encode_json(\@acked);
        close $file;
        rename "$path.new", $path or die "$path: $!";
    } else {
        if ($op eq "mark_delete") {
            push @acked, map { [$_ + 0, 0, $ledgers->{$_}] } grep { $_ < $ledger } keys %$ledgers;
        }
        push @acked, [$ledger, $op eq "mark_delete" ? 0 : $entry, $entry + 1];
        push @numbers, $number;
    }
    say_line({accepted => $number});
}
