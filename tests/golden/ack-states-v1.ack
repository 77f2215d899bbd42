{"ackstate_export":1,"source":"pulsar+zk://127.0.0.1:2181","exported_at_ms":1795523993067,"cursor_count":1}
{"topic":"persistent://public/default/t1","subscription":"billing","mark_delete":"3:7","range_count":3,"cursor_properties":{"owner":"team é"},"ledgers":[[3,50],[5,8]],"fingerprints":[[3,22,3705951957,1795523497557]],"state":"CAMQByIUCgdob3Jpem9uEPn//////////wEqCAoECAMQFBAFKhMKBAgFEAcQ////////////ARADMgkIAxCA/L8CEAAyBggFEA8QAA=="}
{"crc32c":"52d5d590"}
